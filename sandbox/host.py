"""What drivers share about the host: boot id, processes by pid and start time, records, uids."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import BadSpec, CreateFailed, SandboxFailure
from .spec import SANDBOX_ID, Handle, Limits

FIRST_UID, UIDS = 200_000, 50_000
UID_LOCKS = Path("/run/tenuto-uids")


def must_fit(limits: Limits) -> None:
    """Raises BadSpec where this machine does not have the memory that one such sandbox may use."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limits.footprint_bytes > have:
        raise BadSpec(
            f"a sandbox with these limits may use {limits.footprint_bytes >> 20} MiB (its files are in memory too), and"
            f" this machine has {have >> 20}: lower memory_bytes or workspace_bytes"
        )


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int:
    """Clock ticks after boot; 0 where there is no such process, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def end(pid: int, start: int, patience_s: float = 10.0) -> bool:
    """Kills one process, if it is still the one that started then, and waits for its end. False if it would not die."""
    if pid <= 0 or start == 0:
        return True
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if start_time(pid) != start:
            return True
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(patience_s * 1000))
    except ProcessLookupError:
        return True
    finally:
        os.close(fd)


def end_tree(roots: set[int]) -> None:
    """Kills processes and all their descendants; for agents that are not the first process of a namespace."""
    for pid in roots:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for _ in range(1000):  # orphans fall to the roots, which are subreapers: none gets out of the tree
        living = {pid: start for pid in descendants(roots) if (start := start_time(pid))}
        if not living:
            break
        for pid, start in living.items():
            end(pid, start)
    for pid in roots:
        end(pid, start_time(pid))


def descendants(roots: set[int]) -> set[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
    found: set[int] = set()
    while True:
        more = {pid for pid, parent in parents.items() if parent in roots | found} - found
        if not more:
            return found
        found |= more


def agents(home: str) -> Iterator[tuple[str, int, int]]:
    """(sandbox id, pid, start) of every agent of this home that runs on this host, written down or not."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):
            start = start_time(int(name))  # read first: if the pid changes hands now, `end` will see it
            words = Path(f"/proc/{name}/cmdline").read_bytes().decode().split("\0")
            at = words.index("tenuto-agent")
            if start and words[at + 1] == home and SANDBOX_ID.match(words[at + 2]):
                yield words[at + 2], int(name), start


def end_agents(home: str, sandbox_id: str) -> None:
    """Kills every agent of one sandbox. Raises SandboxFailure where one does not die."""
    for found, pid, start in agents(home):
        if found == sandbox_id and not end(pid, start):
            raise SandboxFailure(f"process {pid} of the sandbox {sandbox_id} does not die; it may wait for a device")


def free_uid(home: str, sandbox_id: str, session_id: str) -> int:
    """A uid that no living sandbox of this host has; only root can hand one out. `return_uid` gives it back.

    The one that the session's last sandbox had, if it is free: what that left in a writable volume is the session's.
    """
    UID_LOCKS.mkdir(mode=0o700, exist_ok=True)
    first = int(hashlib.sha256(f"{home} {session_id}".encode()).hexdigest(), 16)
    for step in range(UIDS):
        uid = FIRST_UID + (first + step) % UIDS
        with suppress(FileExistsError):
            # A link is made whole or not at all, and it holds its owner's name.
            (UID_LOCKS / str(uid)).symlink_to(f"{home}.{sandbox_id}")
            return uid
    raise CreateFailed(f"all {UIDS} sandbox uids are taken; look into {UID_LOCKS}")


def _uid_locks(home: str) -> Iterator[tuple[Path, str]]:
    with suppress(OSError):
        for path in UID_LOCKS.iterdir():
            with suppress(OSError):
                owner, _, sandbox_id = os.readlink(path).partition(".")
                if owner == home:
                    yield path, sandbox_id


def return_uid(home: str, sandbox_id: str) -> None:
    for path, owner in _uid_locks(home):
        if owner == sandbox_id:
            path.unlink(missing_ok=True)


def uid_owners(home: str) -> list[str]:
    return [sandbox_id for _, sandbox_id in _uid_locks(home)]


def home_id(run_dir: Path) -> str:
    """Names the sandboxes of one installation among all on a host."""
    return hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Records:
    """One folder per sandbox, mode 0700: its socket, its log and its record."""

    root: Path

    def folder(self, sandbox_id: str) -> Path:
        if not SANDBOX_ID.match(sandbox_id):
            raise CreateFailed(f"{sandbox_id!r} is not a sandbox id")
        return self.root / sandbox_id

    def make(self, sandbox_id: str) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        folder = self.folder(sandbox_id)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise CreateFailed(f"the sandbox {sandbox_id!r} exists; release it first") from None
        return folder

    def write(self, sandbox_id: str, facts: dict[str, object]) -> None:
        path = self.folder(sandbox_id) / "record.json"
        temporary = path.with_suffix(".part")
        with open(temporary, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as f:
            json.dump(facts, f)
        os.replace(temporary, path)

    def read(self, sandbox_id: str) -> dict[str, object]:
        try:
            facts = json.loads((self.folder(sandbox_id) / "record.json").read_text())
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def remove(self, sandbox_id: str) -> None:
        shutil.rmtree(self.folder(sandbox_id), ignore_errors=True)

    def __iter__(self) -> Iterator[str]:
        with suppress(FileNotFoundError):
            yield from sorted(name for name in os.listdir(self.root) if SANDBOX_ID.match(name))


async def settled(handle: Handle) -> bool:
    """Whether the agent that a handle names still runs on this host."""
    if handle.boot != boot_id():
        return False
    return handle.pid == 0 or await asyncio.to_thread(start_time, handle.pid) == handle.start
