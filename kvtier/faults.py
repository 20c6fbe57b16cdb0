"""A file system that goes wrong exactly once, at a chosen place: for tests of whatever stands on `Io`.

FAIL     the operation does not happen and raises
TEAR     half of it happens: half the bytes are written, then it raises; half are read, as at a file's end;
         a rename, link or removal happens in full, and raises nevertheless
LIE      half the bytes are written, or one bit is read wrong, and nothing is said
STALL    it waits until it is released, then happens
"""

from __future__ import annotations

import errno
import threading
from enum import Enum
from pathlib import Path
from typing import Final

from kvtier.fileops import Buffer, Io, RealIo, Room


class Fault(Enum):
    FAIL = "fail"
    TEAR = "tear"
    LIE = "lie"
    STALL = "stall"


_ERRORS: Final = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT)


class FaultyIo:
    """See `Io`. Counts operations from 0; the fault hits the one that `arm` chose, and no other."""

    def __init__(self, inner: Io | None = None) -> None:
        self._inner = inner or RealIo()
        self._lock = threading.Lock()
        self._armed: tuple[int, Fault] | None = None
        self.operations = 0
        self.hit: str | None = None  # which operation the last fault hit, on what
        self.stalled, self.released = threading.Event(), threading.Event()

    def arm(self, place: int, fault: Fault) -> None:
        """The fault hits the operation that comes `place` operations from now, 0 being the next."""
        with self._lock:
            self._armed, self.hit = (self.operations + place, fault), None
            self.stalled.clear()
            self.released.clear()

    def disarm(self) -> None:
        """Nothing goes wrong from now on, and what is stalled goes on."""
        with self._lock:
            self._armed = None
        self.released.set()

    def _pass(self, operation: str, subject: object) -> Fault | None:
        """Which fault hits this operation. FAIL raises here; STALL waits here."""
        with self._lock:
            place, self.operations = self.operations, self.operations + 1
            if self._armed is None or self._armed[0] != place:
                return None
            fault, self._armed, self.hit = self._armed[1], None, f"{operation} {subject}"
        if fault is Fault.FAIL:
            raise _error(place)
        if fault is Fault.STALL:
            self.stalled.set()
            self.released.wait()
        return fault

    # --- Io ------------------------------------------------------------------------------------------

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self._pass("open", path)
        return self._inner.open(path, flags, mode)

    def close(self, fd: int) -> None:
        """Never goes wrong: a descriptor is gone whatever close says."""
        self._inner.close(fd)

    def read_at(self, fd: int, buffers: list[Room], offset: int) -> int:
        fault = self._pass("read", offset)
        count = self._inner.read_at(fd, buffers, offset)
        whole = memoryview(buffers[0]).cast("B")
        if fault is Fault.TEAR and count:
            half = len(whole) // 2
            whole[half:] = bytes(len(whole) - half)
            return min(count, half)
        if fault is Fault.LIE and count:
            whole[min(count, len(whole)) // 2] ^= 1
        return count

    def write_at(self, fd: int, buffers: list[Buffer], offset: int) -> None:
        fault = self._pass("write", offset)
        if fault in (Fault.TEAR, Fault.LIE):
            whole = b"".join(bytes(buffer) for buffer in buffers)
            self._inner.write_at(fd, [whole[: len(whole) // 2]], offset)
            self._say(fault)
        else:
            self._inner.write_at(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        fault = self._pass("fsync", fd)
        self._inner.fsync(fd)
        self._say(fault)

    def rename(self, source: Path, target: Path) -> None:
        fault = self._pass("rename", target)
        self._inner.rename(source, target)
        self._say(fault)

    def link(self, source: Path, target: Path) -> None:
        fault = self._pass("link", target)
        self._inner.link(source, target)
        self._say(fault)

    def unlink(self, path: Path) -> None:
        fault = self._pass("unlink", path)
        self._inner.unlink(path)
        self._say(fault)

    def truncate(self, fd: int, size: int) -> None:
        fault = self._pass("truncate", size)
        self._inner.truncate(fd, size)
        self._say(fault)

    def _say(self, fault: Fault | None) -> None:
        if fault is Fault.TEAR:
            raise _error(self.operations)


def _error(place: int) -> OSError:
    number = _ERRORS[place % len(_ERRORS)]
    return OSError(number, f"injected: {errno.errorcode[number]}")
