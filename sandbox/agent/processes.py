"""Processes as /proc shows them: whole trees found, stopped and killed."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress

Table = dict[int, tuple[int, str]]


def processes() -> Table:
    """pid -> (parent, state letter) of everything in this pid namespace."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as f:
                    state, parent = f.read().rsplit(b")", 1)[1].split()[:2]
            except OSError:
                continue
            found[int(name)] = (int(parent), state.decode())
    return found


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


def shared_writable(pids: set[int]) -> set[int] | None:
    """Inodes that somebody has mapped to write: their mtime does not tell of every change. None where a process does
    not let us see what it has mapped, so that it may be any."""
    inodes = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", errors="replace") as f:
                for line in f:
                    field = line.split(None, 5)
                    if field[1][1] == "w" and field[1][3] == "s":
                        inodes.add(int(field[4]))
        except PermissionError:
            return None
        except OSError:
            pass
    return inodes
