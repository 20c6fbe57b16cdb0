"""Processes as /proc shows them: whole trees found, stopped and killed."""

from __future__ import annotations

import os
import resource
import signal
import stat
import time
from collections.abc import Callable
from contextlib import suppress

MOST_HELD = 512
Table = dict[int, tuple[int, str]]


def processes() -> Table:
    """pid -> (parent, state letter) of everything in this pid namespace."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat_of(f"/proc/{name}")
            if fields is not None and fields[0] == "Z" and fields[17] != "1":  # its first thread alone has ended
                states = {each[0] for task in tasks(int(name)) if (each := stat_of(task)) is not None}
                fields[0] = min(states - {"Z", "X"}, default="Z")  # an "S" before a "T"
            if fields is not None:
                found[int(name)] = (int(fields[1]), fields[0])
    return found


def stat_of(place: str) -> list[str] | None:
    """From the state on; field 17 is the number of threads."""
    try:
        with open(f"{place}/stat", "rb") as f:
            return f.read().rsplit(b")", 1)[1].decode().split()
    except OSError:
        return None


def below(roots: set[int], table: Table) -> set[int]:
    """All living descendants of `roots`, the roots themselves left out."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    out: set[int] = set()
    todo = list(roots)
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in out and pid not in roots:
                out.add(pid)
                todo.append(pid)
    return {pid for pid in out if table[pid][1] not in "ZX"}


def younger(root: int, old: set[int]) -> set[int]:
    """What is below `root` now and neither among `old` nor below them."""
    table = processes()
    return below({root}, table) - below(old, table) - old


def send_signal(pid: int, number: int) -> None:
    with suppress(OSError):
        os.kill(pid, number)


def stop(find: Callable[[], set[int]]) -> set[int]:
    """SIGSTOP until nothing new appears: what is stopped cannot fork, so this ends even against a fork bomb."""
    stopped: set[int] = set()
    for _ in range(1000):
        new = find() - stopped
        if not new:
            break
        for pid in new:
            send_signal(pid, signal.SIGSTOP)
        stopped |= new
    return stopped


def kill(find: Callable[[], set[int]]) -> list[int]:
    """Kills all that `find` finds and waits until it finds nothing."""
    killed = stop(find)
    deadline = time.monotonic() + 5
    while True:
        alive = find()
        if not alive or time.monotonic() > deadline:
            return sorted(killed)
        for pid in alive:
            send_signal(pid, signal.SIGKILL)
        killed |= alive
        time.sleep(0.001)


def name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as f:
            return f"{pid} {f.read().strip()}"
    except OSError:
        return str(pid)


def resident_bytes(pids: set[int]) -> int:
    """Private resident memory; shared pages and tmpfs files have limits of their own."""
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as f:
                numbers = f.read().split()
            pages += int(numbers[1]) - int(numbers[2])
        except (OSError, IndexError):
            pass
    return pages * resource.getpagesize()


def proportional_bytes(pids: set[int]) -> int:
    """Private memory with shared pages divided among their users; slower to read than `resident_bytes`."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as f:
                fields = dict(line.split()[:2] for line in f if line.startswith((b"Pss_Anon:", b"Swap:")))
            total += (int(fields[b"Pss_Anon:"]) + int(fields.get(b"Swap:", 0))) * 1024
        except (OSError, LookupError, ValueError):
            total += resident_bytes({pid})
    return total


def tasks(pid: int) -> list[str]:
    """Where /proc shows its threads: the first may have ended before the others, and each may have files of its own."""
    try:
        return [f"/proc/{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def mapped(pids: set[int]) -> set[int] | None:
    """Inodes that somebody has mapped to share, now to write or before: nothing tells of a write to them. None where a
    process does not let us see what it has mapped, so that it may be any."""
    inodes = set()
    for place in [place for pid in pids for place in tasks(pid)]:
        try:
            with open(f"{place}/maps", errors="replace") as f:
                for line in f:
                    field = line.split(None, 5)
                    if field[1][3] == "s":
                        inodes.add(int(field[4]))
        except PermissionError:
            return None
        except OSError:
            pass
    return inodes


def held(pids: set[int]) -> set[int] | None:
    """Inodes of the files that somebody has open, perhaps by a name that is gone. None where these may be any: there
    is a socket, in which files can be under way, or too much to look at, or a process that does not let us."""
    inodes, left = set(), MOST_HELD
    for place in [place for pid in pids for place in tasks(pid)]:
        try:
            found = ["exe", *(f"fd/{name}" for name in os.listdir(f"{place}/fd"))]
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return None
        left -= len(found)
        if left < 0:
            return None
        for name in found:
            try:
                st = os.stat(f"{place}/{name}")
            except (FileNotFoundError, ProcessLookupError):
                continue  # of a thread that has ended
            except OSError:
                return None
            if stat.S_ISSOCK(st.st_mode):
                return None
            inodes.add(st.st_ino)
    return inodes
