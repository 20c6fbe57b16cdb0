"""The values that go in and out of a sandbox. All frozen; sizes in bytes, times in seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from .errors import BadSpec

Reason = Literal["exit", "signal", "timeout", "oom", "lost"]
Stream = Literal["out", "err", "note"]
SHM_BYTES = 16 << 20
MAX_FILES = 65_536  # in all of a sandbox; their inodes are the largest part of the overhead
OVERHEAD_BYTES = 96 << 20
SANDBOX_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
VOLUME_TARGET = re.compile(r"/mnt/[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
# The grammar of references that Docker has, without its leniences: no id, no option, nothing to be unescaped.
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REGISTRY = r"(?:[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[0-9]{1,5})?/)?"
IMAGE = re.compile(
    rf"{_REGISTRY}{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?\Z", re.A
)


def canonical(name: str) -> str:
    """The name of an image with its tag. Raises BadSpec where it is no such name."""
    if len(name) > 255 or not IMAGE.match(name):
        shown = name if len(name) <= 80 else f"{name[:80]}..."
        raise BadSpec(
            f"{shown!r} is no name of an image; write it as python:3.12-slim or registry.example.com/team/box:1"
        )
    return name if "@" in name or ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"


_RANGES: dict[str, tuple[type, float, float]] = {
    "memory_bytes": (int, 32 << 20, 1 << 50),
    "pids": (int, 8, 1 << 22),
    "cpu": (float, 0.01, 1024),
    "workspace_bytes": (int, 1 << 20, 1 << 50),
    "tmp_bytes": (int, 1 << 20, 1 << 50),
    "output_bytes": (int, 1, 16 << 20),
    "call_timeout_s": (float, 0.001, 31_536_000),
}


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. Where a backend cannot enforce a limit, `Driver.describe` says so.

    `memory_bytes` is for processes; files in /work and /tmp live in memory too and are counted by their own limits,
    so a host must have `footprint_bytes` to spare for each sandbox.
    """

    memory_bytes: int = 512 << 20
    pids: int = 256
    cpu: float = 1.0
    workspace_bytes: int = 256 << 20
    tmp_bytes: int = 64 << 20
    output_bytes: int = 256 << 10
    call_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name, (kind, least, most) in _RANGES.items():
            value: Any = getattr(self, name)
            if type(value) not in (int, kind):
                raise BadSpec(f"{name} is {value!r}, which is no {'whole ' if kind is int else ''}number")
            if not least <= value <= most:  # NaN is in no range
                raise BadSpec(f"{name} is {value}; a sandbox takes from {least} to {most}")

    @property
    def footprint_bytes(self) -> int:
        return self.memory_bytes + self.workspace_bytes + self.tmp_bytes + SHM_BYTES + OVERHEAD_BYTES


@dataclass(frozen=True)
class Volume:
    """A directory of the host that the operator opens; `target` is /mnt/<name>. Nothing else of the host is visible."""

    source: Path
    target: str
    read_only: bool = True

    def __post_init__(self) -> None:
        if not VOLUME_TARGET.match(self.target):
            raise BadSpec(f"the volume target {self.target!r} is not of the form /mnt/<name>")
        if not self.source.is_absolute():
            raise BadSpec(f"the volume source {str(self.source)!r} is not an absolute path")
        if "," in str(self.source):
            raise BadSpec(f"the volume source {str(self.source)!r} has a comma in it, which Docker takes as an option")


@dataclass(frozen=True)
class SandboxSpec:
    """One sandbox to be made. `ttl_s`: how long its agent lives on after its controller is gone. `image`: the name of
    an image to make it of, where the backend has such; None for the built-in one."""

    sandbox_id: str
    session_id: str
    tenant_id: str
    epoch: int
    limits: Limits = Limits()
    volumes: tuple[Volume, ...] = ()
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    ttl_s: float = 900.0
    image: str | None = None

    def __post_init__(self) -> None:
        if self.image is not None:
            canonical(self.image)
        if not SANDBOX_ID.match(self.sandbox_id):
            raise BadSpec(f"the sandbox id {self.sandbox_id!r} is not 1 to 63 letters, digits, '-' or '_'")
        if len({volume.target for volume in self.volumes}) != len(self.volumes):
            raise BadSpec("two volumes have the same target")


@dataclass(frozen=True)
class Handle:
    """All that another process needs to attach. It holds the token: store it where secrets may be.

    `pid` and `start` (clock ticks after boot) name the agent on this host; `boot` is the host's boot id.
    """

    driver: str
    sandbox_id: str
    session_id: str
    socket: str
    pid: int
    start: int
    boot: str
    epoch: int
    limits: Limits
    token: str = field(repr=False)
    extra: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def to_json(self) -> dict[str, Any]:
        """A plain dict of strings, numbers and dicts."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**plain, "limits": asdict(self.limits), "extra": dict(self.extra)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str) -> Handle:
        """The inverse of `to_json`; also takes its JSON text."""
        data = json.loads(value) if isinstance(value, str) else dict(value)
        try:
            return cls(**{**data, "limits": Limits(**data["limits"])})
        except (KeyError, TypeError) as error:
            raise BadSpec(f"this is not a sandbox handle: {error}") from None


@dataclass(frozen=True)
class Chunk:
    """A piece of output: stream "out" or "err", or "note" for the marker that says how much was left out."""

    stream: Stream
    data: bytes


@dataclass(frozen=True)
class Result:
    """How a call ended.

    `code` is the exit code for "exit", the signal for "signal", and what the tool's own process returned otherwise
    (None for "lost"). `output` is what was captured, both streams as they came, capped, with the marker in it.
    `background`: how many processes it left behind, which ended with it unless it was to keep them.
    """

    reason: Reason
    code: int | None
    stdout_bytes: int
    stderr_bytes: int
    truncated: bool
    duration_s: float
    output: bytes = b""
    background: int = 0

    @property
    def ok(self) -> bool:
        return self.reason == "exit" and self.code == 0


@dataclass(frozen=True)
class Running:
    """A call that has not ended."""

    argv: tuple[str, ...]
    elapsed_s: float
    output: bytes


@dataclass(frozen=True)
class Said:
    """A piece of what an interactive call wrote to its standard output.

    `data` begins at byte `offset`, which is later than the byte asked for where that one is no longer kept; `end` is
    how much there is in all. `result` comes with the last piece of a call that has ended.
    """

    offset: int
    end: int
    data: bytes
    result: Result | None


@dataclass(frozen=True)
class Entry:
    """One name in a directory of the workspace; kind is file, directory, link or other."""

    name: str
    kind: str
    size_bytes: int
    mode: int


class Snapshot(str):
    """A root's hash. `left_out`: what it does not keep, each as "path: why"; sockets and pipes are not named.

    `stale`: paths whose content had changed unseen, as a verifying snapshot finds them; it has their new content.
    """

    left_out: tuple[str, ...]
    stale: tuple[str, ...]

    def __new__(cls, root: str, left_out: Iterable[str] = (), stale: Iterable[str] = ()) -> Snapshot:
        made = super().__new__(cls, root)
        made.left_out, made.stale = tuple(left_out), tuple(stale)
        return made


class Restored(list[str]):
    """ "pid name" of each process that a restore killed. `left_out`: what could not be restored, as "path: why"."""

    def __init__(self, killed: Iterable[str], left_out: Iterable[str] = ()) -> None:
        super().__init__(killed)
        self.left_out = tuple(left_out)


@dataclass(frozen=True)
class Description:
    """What a backend is, and which limits hold: name -> how, or None where nothing enforces it."""

    backend: str
    isolation: str
    limits_enforced: Mapping[str, str | None]
    notes: tuple[str, ...] = ()
