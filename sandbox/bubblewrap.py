"""Sandboxes by bubblewrap: namespaces and a filter of system calls. No daemon, no root needed, weaker than a container.

As root, bwrap is never started as root (it could write the host's /proc/sys): each sandbox has a uid of its own. The
agent inherits a socket that already listens, in a folder that only we can enter. Nothing else of ours is inherited, and
the sandbox is a child of nobody, so it outlives us.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import cgroups, host, image, seccomp, unstopped
from .driver import Sandbox
from .errors import CreateFailed, NoSandbox, SandboxLost
from .launch import confirmed, last_words, listen, pipe_with, refuse_image
from .spec import MAX_FILES, SHM_BYTES, Description, Handle, SandboxSpec

ISOLATION = (
    "weaker isolation: namespaces, no capabilities and a system call filter, on the host's own kernel; it cannot stop a"
    " fault of that kernel, nor hide what /proc tells of the host"
)
START_S = 20.0
BOOT = f"import sys; sys.path.insert(0, {image.AGENT_HOME!r}); from agent.main import main; main()"
# The shell makes bwrap an orphan at once: whoever started it may die without it, and need not wait for it.
ORPHAN = '"$@" </dev/null & exit 0'


class _Start:
    """What one start needs open: the descriptors that the child inherits, and the one that we read."""

    def __init__(self, spec: SandboxSpec, folder: Path, group: cgroups.Group | None) -> None:
        held = group.folders if group is not None else {}
        counter = group.oom_counter() if group is not None else None
        self.listener = listen(folder / "agent.sock")
        self.token = secrets.token_hex(32)
        self.counter = os.open(counter, os.O_RDONLY) if counter else None
        self.reader, self.info = os.pipe()
        self.filter = pipe_with(seccomp.program(segments=False))
        limits = {
            "nproc": None if "pids" in held else spec.limits.pids + 1,
            "data": 2 * spec.limits.memory_bytes,  # per process: a ceiling until the watchdog looks
        }
        config = {
            "token": self.token,
            "epoch": spec.epoch,
            "work": "/work",
            "ttl_s": spec.ttl_s,
            "outside_only": True,
            "memory_bytes": spec.limits.memory_bytes,
            "seccomp": "",
            "listen_fd": self.listener.fileno(),
            "oom_counters": [] if self.counter is None else [self.counter],
            "limits": limits,
            "nice": 15 if "cpu" in held else 5,
            "tmpfs": ["/work", "/tmp", "/dev/shm"],
            "max_files": MAX_FILES,
        }
        self.config = pipe_with(json.dumps(config).encode())

    def inherited(self) -> list[int]:
        fds = [self.listener.fileno(), self.config, self.filter, self.info]
        return fds if self.counter is None else [*fds, self.counter]

    def close_inherited(self) -> None:
        """After this, the end of the info pipe means that bwrap has closed it, or is dead."""
        inherited = self.inherited()
        self.listener.detach()
        for fd in inherited:
            os.close(fd)


def why_not() -> str | None:
    """Why bubblewrap cannot work here, as a sentence that says what to do; None if it can."""
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed (apt-get install bubblewrap, or dnf install bubblewrap)"
    if not seccomp.supported():
        return f"no system call filter for this processor ({os.uname().machine}); x86-64 and aarch64 have one"
    uid = host.FIRST_UID - 1 if os.getuid() == 0 else None
    trial = [program, "--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "--proc", "/proc"]
    try:
        answer = subprocess.run(
            [*trial, "--", "/bin/true"],
            capture_output=True,
            text=True,
            timeout=20,
            cwd="/",
            check=False,
            **_as_user(uid),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"bubblewrap does not start: {error}"
    if answer.returncode == 0:
        return None
    hint = ""
    if "disable-userns" in answer.stderr:
        hint = "; bubblewrap 0.8 or later is needed"
    elif "uid map" in answer.stderr or "namespace" in answer.stderr:
        hint = "; allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or an AppArmor profile for bwrap)"
    return f"bubblewrap does not start here: {answer.stderr.strip()[:300]}{hint}"


class BubblewrapDriver:
    """Open with `await BubblewrapDriver.open(home, run_dir)`."""

    name = "bubblewrap"
    isolation = ISOLATION

    def __init__(self, run_dir: Path, built: image.Image, groups: cgroups.Cgroups | None) -> None:
        self.program = shutil.which("bwrap") or "bwrap"
        self.image = built
        self.groups = groups
        self.home = host.home_id(run_dir)
        self.records = host.Records(run_dir / "bubblewrap")

    @classmethod
    async def open(cls, home: Path, run_dir: Path) -> BubblewrapDriver:
        """Builds the image where it is missing. Raises NoSandbox with a sentence that says what to do."""
        reason = await asyncio.to_thread(why_not)
        if reason is not None:
            raise NoSandbox(reason)
        built = await asyncio.to_thread(image.build, images_folder(home))
        return cls(run_dir, built, await asyncio.to_thread(cgroups.find))

    async def create(self, spec: SandboxSpec) -> Handle:
        handle = await asyncio.to_thread(self._create, spec)
        return await confirmed(self, handle, self.records.folder(spec.sandbox_id) / "agent.log")

    def _create(self, spec: SandboxSpec) -> Handle:
        host.must_fit(spec.limits)
        refuse_image(spec, self.name)
        folder = self.records.make(spec.sandbox_id)
        facts: dict[str, object] = {"sandbox_id": spec.sandbox_id, "driver": self.name}
        try:
            uid = host.free_uid(self.home, spec.sandbox_id, spec.session_id) if os.getuid() == 0 else None
            group = self._group(spec)
            facts["groups"] = [str(path) for path in group.folders.values()] if group else []
            self.records.write(spec.sandbox_id, facts)
            return self._start(spec, folder, uid, group)
        except BaseException as error:
            said = last_words(folder / "agent.log")  # a process that ended at once said why
            self.records.write(spec.sandbox_id, facts)
            self._remove(spec.sandbox_id)
            if isinstance(error, OSError | subprocess.SubprocessError):
                message = f"the sandbox {spec.sandbox_id} could not be made: {error} {said}"
                raise CreateFailed(message.rstrip()) from error
            raise

    def _group(self, spec: SandboxSpec) -> cgroups.Group | None:
        return self.groups.make(f"{self.home}-{spec.sandbox_id}", spec.limits) if self.groups else None

    def _start(self, spec: SandboxSpec, folder: Path, uid: int | None, group: cgroups.Group | None) -> Handle:
        start = _Start(spec, folder, group)
        try:
            try:
                self._spawn(self._command(spec, start), start, folder / "agent.log", uid)
            finally:
                start.close_inherited()
            pid = self._inner_pid(start.reader, folder)
        finally:
            os.close(start.reader)
        if group is not None:
            group.add(pid)
        return Handle(
            driver=self.name,
            sandbox_id=spec.sandbox_id,
            session_id=spec.session_id,
            socket=str(folder / "agent.sock"),
            pid=pid,
            start=host.start_time(pid),
            boot=host.boot_id(),
            epoch=spec.epoch,
            limits=spec.limits,
            token=start.token,
            extra=MappingProxyType({**spec.labels, "tenant": spec.tenant_id, "environment": "{}"}),
        )

    @staticmethod
    def _spawn(command: list[str], start: _Start, log: Path, uid: int | None) -> None:
        with open(log, "wb") as f:
            subprocess.run(
                ["/bin/sh", "-c", ORPHAN, "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=f,
                stderr=f,
                pass_fds=start.inherited(),
                cwd="/",
                env={"PATH": image.SYSTEM_PATH},
                start_new_session=True,
                timeout=START_S,
                check=True,
                **_as_user(uid),
            )

    def _command(self, spec: SandboxSpec, start: _Start) -> list[str]:
        limits = spec.limits
        words = [self.program, "--unshare-all", "--unshare-user", "--disable-userns", "--new-session", "--as-pid-1"]
        words += ["--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox", "--uid", "1000", "--gid", "1000"]
        words += ["--ro-bind", str(self.image.rootfs), "/", "--proc", "/proc", "--dev", "/dev"]
        # The owner of a namespace may write its settings (shared memory without limit, for one): nobody may here.
        words += ["--ro-bind", "/proc/sys", "/proc/sys"]
        # bwrap's /dev is a writable tmpfs without a size: only /dev/shm stays writable, and sized.
        words += ["--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        words += ["--size", str(limits.tmp_bytes), "--tmpfs", "/tmp", "--size", str(limits.workspace_bytes)]
        words += ["--tmpfs", "/work", "--size", "1048576", "--tmpfs", "/mnt"]
        for volume in spec.volumes:
            words += ["--ro-bind" if volume.read_only else "--bind", str(volume.source), volume.target]
        words += ["--remount-ro", "/mnt", "--chdir", "/work", "--setenv", "LANG", "C.UTF-8"]
        words += ["--seccomp", str(start.filter), "--info-fd", str(start.info), "--"]
        words += [self.image.python, "-I", "-S", "-B", "-c", BOOT]
        return [*words, "tenuto-agent", self.home, spec.sandbox_id, str(start.config)]

    def _inner_pid(self, reader: int, folder: Path) -> int:
        """bwrap tells the pid of its inner process, the agent, or dies and says why in the log."""
        with open(reader, "rb", closefd=False) as f:
            text = f.read().decode(errors="replace")
        found = re.search(r'"child-pid": (\d+)', text)
        if found is None:
            log = (folder / "agent.log").read_text(errors="replace").strip()
            raise CreateFailed(f"bubblewrap did not start the sandbox: {log[-500:] or 'it said nothing'}")
        return int(found[1])

    async def attach(self, handle: Handle, epoch: int | None = None) -> Sandbox:
        if not await host.settled(handle):
            raise SandboxLost(f"the sandbox {handle.sandbox_id} is gone: its agent no longer runs")
        return await Sandbox(handle, epoch).open()

    async def release(self, handle: Handle) -> None:
        if handle.boot == host.boot_id():
            await asyncio.to_thread(host.end, handle.pid, handle.start)
        await asyncio.to_thread(self._remove, handle.sandbox_id)

    async def found(self) -> list[str]:
        return await asyncio.to_thread(self._found)

    def _found(self) -> list[str]:
        known = {*self.records, *(sandbox_id for sandbox_id, _, _ in host.agents(self.home))}
        known |= set(host.uid_owners(self.home))
        known |= set(self.groups.names(f"{self.home}-") if self.groups else [])
        return sorted(known)

    async def reap(self, live: Collection[str], among: Collection[str] | None = None) -> list[str]:
        return await asyncio.to_thread(self._reap, frozenset(await self.found() if among is None else among), live)

    def _reap(self, known: frozenset[str], live: Collection[str]) -> list[str]:
        dead = sorted(known.difference(live))
        for sandbox_id in dead:
            self._remove(sandbox_id)
        return dead

    def _remove(self, sandbox_id: str) -> None:
        """Kills the inner process, and with it all in its pid namespace; then removes what we made around it."""
        facts = self.records.read(sandbox_id)
        host.end_agents(self.home, sandbox_id)
        groups = facts.get("groups")
        cgroups.remove([str(path) for path in groups] if isinstance(groups, list) else [])
        if self.groups is not None:
            self.groups.group(f"{self.home}-{sandbox_id}").remove()
        host.return_uid(self.home, sandbox_id)
        self.records.remove(sandbox_id)

    async def describe(self) -> Description:
        held = self.groups.parents if self.groups else {}
        by_group = f"cgroup v{self.groups.version}" if self.groups else ""
        pids = by_group if "pids" in held else "RLIMIT_NPROC"
        return Description(
            backend=self.name,
            isolation=self.isolation,
            limits_enforced=MappingProxyType({
                "memory_bytes": f"{by_group} and watchdog" if "memory" in held else "watchdog",
                "pids": pids,
                "cpu": by_group if "cpu" in held else None,
                "workspace_bytes": "tmpfs size",
                "tmp_bytes": "tmpfs size",
                "output_bytes": "agent",
                "call_timeout_s": "agent",
            }),
            notes=(
                "no network; nothing of the host is visible but the image and declared volumes",
                "each sandbox has a uid of its own" if os.getuid() == 0 else f"sandboxes run as uid {os.getuid()}",
                f"it cannot stop: {'; '.join(unstopped.by_bubblewrap(held))}",
            ),
        )  # fmt: skip


def _as_user(uid: int | None) -> dict[str, Any]:
    """Arguments for subprocess: another user without groups, or the one that we are."""
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}


def images_folder(home: Path) -> Path:
    """`home/sandbox/images`, unless other users cannot get there: as root, sandboxes are other users."""
    folder = home / "sandbox" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:  # whatever the umask: other users may pass, and see nothing
        for path in (folder, folder.parent):
            path.chmod(0o711)
    if os.getuid() != 0 or all(path.stat().st_mode & 0o001 for path in (folder, *folder.resolve().parents)):
        return folder
    shared = Path("/var/lib/tenuto/images")
    shared.mkdir(parents=True, exist_ok=True)
    for path in (shared, shared.parent):
        path.chmod(0o711)
    return shared
