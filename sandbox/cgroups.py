"""Control groups below our own, version 1 or 2, where we may make them. Where we may not, the agent's watchdog counts.

Version 1 has one tree per controller; our groups are children of the group that we are in, so no limit set above us is
escaped. In version 2 a group with processes cannot hand controllers to children; there our groups are its siblings.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from .spec import Limits

PERIOD_US = 100_000
PREFIX = "tenuto-"
_CONTAINER = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Cgroups:
    """Where groups can be made: controller (memory, pids, cpu) -> folder. Version 2 has the same folder for all."""

    version: int
    parents: Mapping[str, Path]

    def make(self, name: str, limits: Limits) -> Group:
        """A new group with its limits set. Raises OSError where the kernel refuses."""
        group = self.group(name)
        folders = group.folders
        try:
            for folder in set(folders.values()):
                folder.mkdir(exist_ok=True)
            for controller, file, value in self._settings(limits):
                if controller in folders:
                    (folders[controller] / file).write_text(value)
            if self.version == 1 and "memory" in folders:
                with suppress(OSError):  # only where the kernel counts swap
                    (folders["memory"] / "memory.memsw.limit_in_bytes").write_text(str(limits.footprint_bytes))
            if self.version == 2 and "memory" in folders:
                with suppress(OSError):
                    (folders["memory"] / "memory.swap.max").write_text("0")
        except OSError:
            group.remove()
            raise
        return group

    def group(self, name: str) -> Group:
        """The group of this name, made or not."""
        folders = {controller: parent / f"{PREFIX}{name}" for controller, parent in self.parents.items()}
        return Group(self.version, MappingProxyType(folders))

    def names(self, prefix: str) -> list[str]:
        """What is left of the names that begin with `prefix`, without it."""
        start = len(PREFIX + prefix)
        found = {path.name for parent in self.parents.values() for path in parent.glob(f"{PREFIX}{prefix}*")}
        return sorted(name[start:] for name in found)

    def _settings(self, limits: Limits) -> list[tuple[str, str, str]]:
        # The workspace is in memory and has a limit of its own; three more for the agent and two shepherds.
        memory, pids = str(limits.footprint_bytes), str(limits.pids + 3)
        quota = max(1000, int(limits.cpu * PERIOD_US))
        if self.version == 2:
            cpu = [("cpu", "cpu.max", f"{quota} {PERIOD_US}")]
            return [("memory", "memory.max", memory), ("pids", "pids.max", pids), *cpu]
        return [
            ("memory", "memory.limit_in_bytes", memory),
            ("pids", "pids.max", pids),
            ("cpu", "cpu.cfs_period_us", str(PERIOD_US)),
            ("cpu", "cpu.cfs_quota_us", str(quota)),
        ]


@dataclass(frozen=True)
class Group:
    """One sandbox's group."""

    version: int
    folders: Mapping[str, Path]

    def add(self, pid: int) -> None:
        for folder in set(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def oom_counter(self) -> Path | None:
        """A file with a line `oom_kill N`."""
        if "memory" not in self.folders:
            return None
        return self.folders["memory"] / ("memory.events" if self.version == 2 else "memory.oom_control")

    def remove(self) -> None:
        remove([str(folder) for folder in self.folders.values()])


def remove(folders: list[str]) -> None:
    """Removes groups whose processes are dead; the kernel needs a moment to notice."""
    for folder in dict.fromkeys(folders):
        for _ in range(200):
            try:
                os.rmdir(folder)
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.005)


def container_of(pid: int) -> str:
    """The id of the Docker container that a process runs in, by its groups; empty where it is in none but our own."""
    try:
        ours, theirs = (_CONTAINER.findall(Path(f"/proc/{of}/cgroup").read_text()) for of in ("self", pid))
    except OSError:
        return ""
    return next((found for found in reversed(theirs) if found not in ours), "")


def of_container(container: str) -> list[str]:
    """Groups that Docker made for a container, whichever their parent: an engine that was killed may forget them."""
    if not container:
        return []
    root = Path("/sys/fs/cgroup")
    patterns = (f"*/*/{container}", f"*/{container}", f"*/docker-{container}.scope")
    return [str(path) for pattern in patterns for path in root.glob(pattern)]


def find() -> Cgroups | None:
    """Where this process may make groups and move its children into them, tried with a real one; None if nowhere."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    for candidate in (_version_2(lines, mounts), _version_1(lines, mounts)):
        if candidate is not None and candidate.parents and _works(candidate):
            return candidate
    return None


def _version_1(lines: list[list[str]], mounts: list[list[str]]) -> Cgroups | None:
    points = {option: Path(m[1]) for m in mounts if m[2] == "cgroup" for option in m[3].split(",")}
    parents = {}
    for _, controllers, path in lines:
        for controller in controllers.split(","):
            if controller in ("memory", "pids", "cpu") and controller in points:
                folder = points[controller] / path.lstrip("/")
                if folder.is_dir() and os.access(folder, os.W_OK):
                    parents[controller] = folder
    return Cgroups(1, MappingProxyType(parents)) if parents else None


def _version_2(lines: list[list[str]], mounts: list[list[str]]) -> Cgroups | None:
    point = next((Path(m[1]) for m in mounts if m[2] == "cgroup2"), None)
    path = next((line[2] for line in lines if line[0] == "0"), None)
    if point is None or path is None:
        return None
    own = point / path.lstrip("/")
    for parent in dict.fromkeys([own.parent if own != point else own, point]):
        with suppress(OSError):
            given = set((parent / "cgroup.subtree_control").read_text().split())
            wanted = {name for name in ("memory", "pids", "cpu") if name in given}
            if wanted and os.access(parent, os.W_OK):
                return Cgroups(2, MappingProxyType(dict.fromkeys(sorted(wanted), parent)))
    return None


def _works(candidate: Cgroups) -> bool:
    """Makes a group, moves a child of ours in, and removes both."""
    try:
        group = candidate.make(f"probe-{os.getpid()}", Limits())
    except OSError:
        return False
    reader, writer = os.pipe()
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "read x"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)])
    os.close(reader)
    try:
        group.add(pid)
        return True
    except OSError:
        return False
    finally:
        os.close(writer)
        os.waitpid(pid, 0)
        group.remove()
