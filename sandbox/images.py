"""What Docker runs: our own image, imported and never pulled, and images of the user's that our agent can live in.

An image of the user's may be any Linux image of this processor, with or without a Python. It is not run for this and
none of its configuration is kept (user, entry point, environment, volumes, health check, triggers): its files are
exported, cleaned, given `/.tenuto`, and imported again. `/.tenuto` is our interpreter with its library, the shared
libraries of both and the loader that starts them, so it does not matter what the image has of those. The result is
one more copy of the image's files on the engine's disk, named by what it was made from.

The image's environment reaches the tools, below what a call brings, and never the agent.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Protocol

from . import closure, image
from .errors import BadSpec, CreateFailed, SandboxFailure
from .spec import canonical

RECIPE = "1"
IMPORT_S, PULL_S = 300.0, 900.0
MADE, TRIED = "tenuto.made", "tenuto.tried"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
# Where something is mounted: a link there in the image would lead the mount elsewhere.
OURS = ("dev", "etc", "mnt", "proc", "run", "run/tenuto", "sys", "tmp", "work")
DROPPED = ("etc/ld.so.preload",)  # it would be loaded into the agent too
NOT_FOR_TOOLS = ("HOME", "TMPDIR", "HOSTNAME")
MAX_ENVIRONMENT = 32 << 10


class Engine(Protocol):
    def ask(self, *words: str, patience_s: float | None = None, stdin: IO[bytes] | None = None) -> str: ...


@dataclass(frozen=True)
class Runnable:
    """`words` start Python in `tag`; `agent` is the folder of the agent there; `environment` is for tools."""

    tag: str
    words: tuple[str, ...]
    agent: str
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def own(engine: Engine, built: image.Image) -> Runnable:
    """Our own image, which the engine is given if it does not have it. Raises SandboxFailure."""
    tag = f"tenuto-sandbox:{built.digest}"
    if not engine.ask("images", "--quiet", tag):
        archive = built.rootfs.with_suffix(f".{os.getpid()}.tar")
        try:
            with tarfile.open(archive, "w") as tar:
                tar.add(built.rootfs, arcname=".", filter=_as_root)
            _import(engine, archive, tag)
        finally:
            archive.unlink(missing_ok=True)
    return Runnable(tag, (built.python,), image.AGENT_HOME)


class UserImages:
    """Images by name, each made runnable once. `pull`: one that the engine does not have may be fetched."""

    def __init__(self, engine: Engine, built: image.Image, home: str, folder: Path, pull: bool) -> None:
        self.engine = engine
        self.built = built
        self.home = home
        self.folder = folder  # for archives that lie between an export and an import
        self.pull = pull

    def runnable(self, name: str) -> Runnable:
        """Blocking; as long as it takes to copy the image, the first time. Raises BadSpec, SandboxFailure."""
        facts = self._facts(name)
        if facts["Os"] != "linux" or facts["Architecture"] != MACHINES[platform.machine()]:
            said = f"{facts['Os']}/{facts['Architecture']}"
            raise BadSpec(f"the image {name!r} is for {said}, and this machine is linux/{MACHINES[platform.machine()]}")
        environment = _environment(name, (facts.get("Config") or {}).get("Env") or [])
        made = hashlib.sha256(json.dumps([RECIPE, facts["Id"], self.built.digest]).encode()).hexdigest()[:32]
        tag = f"tenuto-derived:{made}"
        if not self.engine.ask("images", "--quiet", tag):
            with self._alone():
                if not self.engine.ask("images", "--quiet", tag):
                    self._make(name, facts["Id"], tag)
            with suppress(SandboxFailure):
                self.clean()
        return Runnable(tag, self.runtime.words, self.runtime.agent, MappingProxyType(environment))

    @functools.cached_property
    def runtime(self) -> closure.Closure:
        return closure.of(self.built)

    def _facts(self, name: str) -> dict[str, Any]:
        facts = self._inspect(name)
        if facts is None and self.pull:
            try:
                self.engine.ask("pull", "--quiet", name, patience_s=PULL_S)
            except SandboxFailure as error:
                raise CreateFailed(
                    f"the image {name!r} is not on this engine and could not be pulled: {error}"
                ) from None
            facts = self._inspect(name)
        if facts is None:
            raise BadSpec(
                f"there is no image {name!r} on the Docker engine of this machine, and it is not pulled from a registry"
                f" (TENUTO_SANDBOX_PULL is never): run `docker pull {name}` here, or set TENUTO_SANDBOX_PULL=missing"
            )
        return facts

    def _inspect(self, name: str) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self.engine.ask("image", "inspect", name))[0])
        except SandboxFailure as error:
            if "no such image" in str(error).lower():
                return None
            raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One maker at a time among all processes of this installation."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "making.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make(self, name: str, found: str, tag: str) -> None:
        exported, cleaned = (self.folder / f"{os.getpid()}.{kind}.tar" for kind in ("exported", "cleaned"))
        # By its id, so that it is still the image that was looked at. It never runs.
        words = ["--pull", "never", "--network", "none", "--label", f"{TRIED}={self.home}", "--entrypoint", "/none"]
        container = self.engine.ask("create", *words, found)
        try:
            self.engine.ask("export", "--output", str(exported), container, patience_s=IMPORT_S)
            with tarfile.open(exported) as source, tarfile.open(cleaned, "w", format=tarfile.PAX_FORMAT) as target:
                copy_clean(source, target)
                self.runtime.add_to(target)
            labels = {MADE: self.home, f"{MADE}.from": canonical(name), f"{MADE}.id": found}
            labels[f"{MADE}.agent"] = self.built.digest
            _import(self.engine, cleaned, tag, labels)
        finally:
            exported.unlink(missing_ok=True)
            cleaned.unlink(missing_ok=True)
            with suppress(SandboxFailure):
                self.engine.ask("rm", "--force", "--volumes", container)

    def clean(self) -> list[str]:
        """Removes what this installation made of images that are gone, were replaced under their name, or were given
        another agent; and what a maker left that was killed. What a sandbox still uses stays. Returns the tags.

        Called when a node starts, and after an image was made.
        """
        left = self.engine.ask("ps", "--all", "--quiet", "--filter", f"label={TRIED}={self.home}").split()
        with self._alone():
            if left:
                self.engine.ask("rm", "--force", "--volumes", *left)
            for path in self.folder.glob("*.tar"):
                path.unlink(missing_ok=True)
            form = "{{.Repository}}:{{.Tag}}"
            tags = self.engine.ask("images", "--filter", f"label={MADE}={self.home}", "--format", form).split()
            return [tag for tag in tags if self._is_stale(tag) and self._removed(tag)]

    def _is_stale(self, tag: str) -> bool:
        facts = self._inspect(tag)
        if facts is None:
            return False
        labels = facts["Config"]["Labels"]
        now = self._inspect(labels[f"{MADE}.from"])
        return now is None or now["Id"] != labels[f"{MADE}.id"] or labels[f"{MADE}.agent"] != self.built.digest

    def _removed(self, tag: str) -> bool:
        try:
            self.engine.ask("rmi", tag)
        except SandboxFailure:
            return False  # a sandbox uses it
        return True


def copy_clean(source: tarfile.TarFile, target: tarfile.TarFile) -> None:
    """Every file but devices and what would get in our way; no program changes its user, none has a capability."""
    dropped, kept = set(), set()
    for member in source:
        name = member.name.removeprefix("./").strip("/")
        in_the_way = name.split("/")[0] == closure.HOME.strip("/") or name in DROPPED
        in_the_way |= name in OURS and not member.isdir()
        if in_the_way or member.ischr() or member.isblk() or (member.islnk() and member.linkname in dropped):
            dropped.add(member.name)
            continue
        kept.add(name)
        member.mode &= 0o1777
        member.pax_headers = {key: text for key, text in member.pax_headers.items() if "xattr" not in key}
        target.addfile(member, source.extractfile(member) if member.isreg() else None)
    for folder in (name for name in OURS if name not in kept):
        member = tarfile.TarInfo(folder)
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        target.addfile(member)


def _environment(name: str, pairs: list[str]) -> dict[str, str]:
    if sum(map(len, pairs)) > MAX_ENVIRONMENT:
        raise BadSpec(f"the environment of the image {name!r} has over {MAX_ENVIRONMENT} characters")
    named = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {key: value for key, value in named.items() if key and key not in NOT_FOR_TOOLS}


def _import(engine: Engine, archive: Path, tag: str, labels: Mapping[str, str] | None = None) -> None:
    words = [word for key, value in (labels or {}).items() for word in ("--change", f"LABEL {key}={value}")]
    with open(archive, "rb") as f:
        engine.ask("import", *words, "-", tag, stdin=f, patience_s=IMPORT_S)


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
