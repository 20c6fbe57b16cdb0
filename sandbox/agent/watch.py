"""Which names in which folders were touched, as the kernel tells it: nothing is looked at to know.

Events wait in the kernel until somebody asks, so tools pay for their making alone. Each comes from the folder that a
file was opened or named through; `processes.held` and hard links are how one can be changed past its own.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time

MODIFY, ATTRIB, CLOSE_WRITE, PLACED = 0x2, 0x4, 0x8, 0x40 | 0x80 | 0x100 | 0x200  # moved from, to; created; deleted
OVERFLOW, IGNORED, ONLYDIR = 0x4000, 0x8000, 0x01000000
EVENT = struct.Struct("iIII")
MOST = 8192  # folders: the kernel's limit is shared by all sandboxes of a user
AGAIN_S = 60.0
LIBC = ctypes.CDLL(None, use_errno=True)
Names = dict[str, int]  # what was touched in a folder, and how: bits of all its events


class Watch:
    """Over folders, by number. Where it cannot be had, or not over all of them, there is none for a while."""

    def __init__(self) -> None:
        self.fd = -1
        self.alive: set[int] = set()
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
                    return None
                if mask & IGNORED:
                    self.alive.discard(number)
                elif length:  # else it is of the folder itself, and the one above says it too
                    name = os.fsdecode(data[at - length : at].rstrip(b"\0"))
                    names = found.setdefault(number, {})
                    names[name] = names.get(name, 0) | mask
        return None
