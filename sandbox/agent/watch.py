"""Which names in which folders were touched, as the kernel tells it: nothing is looked at to know.

Events wait in the kernel until somebody asks, so tools pay for their making alone. Each says the name that a file was
opened by. A file may be changed by another: one that came and went, one in a folder that nobody watches yet (both are
`unsure`: its ctime tells), one that it has had before (`Memory` looks for that), or one that only a process still
knows (`processes.held`).
"""

from __future__ import annotations

import ctypes
import os
import struct
import time

MODIFY, ATTRIB, CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
OVERFLOW, IGNORED, ONLYDIR, ISDIR = 0x4000, 0x8000, 0x01000000, 0x40000000
PLACED = MOVED_FROM | MOVED_TO | CREATE | DELETE
EVENT = struct.Struct("iIII")
MOST = 8192  # folders: the kernel's limit is shared by all sandboxes of a user
AGAIN_S = 60.0
LIBC = ctypes.CDLL(None, use_errno=True)
Names = set[str]


class Watch:
    """Over folders, by number. Where it cannot be had, or not over all of them, there is none for a while."""

    def __init__(self) -> None:
        self.fd = -1
        self.alive: set[int] = set()
        self.unsure = False  # a name that no folder has now may have changed any file, or folders have moved
        self.again_at = 0.0

    def start(self) -> None:
        if self.fd < 0 and time.monotonic() >= self.again_at:
            self.fd = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self.fd < 0:
                self.stop()

    def stop(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.alive, self.again_at = -1, set(), time.monotonic() + AGAIN_S

    def add(self, folder: int) -> int:
        """The number of an open folder, the same as long as it exists; 0 where nobody watches. Look at it after."""
        if self.fd < 0:
            return 0
        mask = MODIFY | ATTRIB | CLOSE_WRITE | PLACED | ONLYDIR
        number: int = LIBC.inotify_add_watch(self.fd, b"/proc/self/fd/%d" % folder, mask)
        if number < 0 or len(self.alive) >= MOST:
            self.stop()
            return 0
        self.alive.add(number)
        return number

    def touched(self) -> dict[int, Names] | None:
        """By folder, since the last time; None where it is not known."""
        found: dict[int, Names] = {}
        arrived: set[tuple[int, str]] = set()
        self.unsure = False
        while self.fd >= 0:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return found
            at = 0
            while at < len(data):
                number, mask, _, length = EVENT.unpack_from(data, at)
                at += EVENT.size + length
                if mask & OVERFLOW:
                    self.stop()
                    self.again_at = 0.0
                elif mask & IGNORED:
                    self.alive.discard(number)
                elif length:  # else it is of the folder itself, and the one above says it too
                    name = os.fsdecode(data[at - length : at].rstrip(b"\0"))
                    found.setdefault(number, set()).add(name)
                    if mask & PLACED:
                        self._place(mask, (number, name), arrived)
        return None

    def _place(self, mask: int, place: tuple[int, str], arrived: set[tuple[int, str]]) -> None:
        if mask & ISDIR or (mask & (DELETE | MOVED_TO) and place in arrived):
            self.unsure = True
        if mask & (CREATE | MOVED_TO):
            arrived.add(place)
        else:
            arrived.discard(place)
