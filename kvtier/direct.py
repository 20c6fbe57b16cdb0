"""Reads past the page cache: into aligned memory, in whole blocks, where the file system allows it.

A tier's pages are read once and then live on the device or the host; keeping them in the page cache as well would
spend memory that no budget counts.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from kvtier.fileops import Io, Room
from kvtier.segment import ALIGN, aligned

Result = TypeVar("Result")
_REFUSALS: Final = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class SpanReader:
    """Thread-safe. `direct` says how it reads; it is given up for good where a file cannot be opened that way."""

    def __init__(self, io: Io, direct: bool) -> None:
        self._io, self.direct = io, direct and hasattr(os, "O_DIRECT")

    def read(self, path: Path, offset: int, size: int) -> memoryview:
        """Exactly `size` bytes, the caller's own; what a short file lacks is zero, and will not verify."""
        span = self._directly(path, lambda fd: self._read_blocks(fd, offset, size))
        if span is None:
            room = bytearray(size)
            self._read_buffered(path, offset, [room])
            span = memoryview(room)
        return span

    def fill(self, path: Path, offset: int, rooms: Sequence[memoryview]) -> None:
        """Fills memory in order; what a short file lacks stays as it was. Without a copy where all of it is aligned."""
        if self.direct and not _aligned(offset, rooms):
            span = self.read(path, offset, sum(room.nbytes for room in rooms))
            for room in rooms:
                room[:], span = span[: room.nbytes], span[room.nbytes :]
        elif self._directly(path, lambda fd: self._io.read_at(fd, list(rooms), offset)) is None:
            self._read_buffered(path, offset, list(rooms))

    @contextmanager
    def opened(self, path: Path) -> Iterator[Callable[[int, memoryview], None]]:
        """`fill(offset, room)` for many pieces of one file, which is opened once where it can be read directly."""
        fd = self._open_direct(path) if self.direct else None

        def fill(offset: int, room: memoryview) -> None:
            if fd is not None and _aligned(offset, [room]):
                try:
                    self._io.read_at(fd, [room], offset)
                    return
                except OSError as error:
                    if error.errno not in _REFUSALS:
                        raise
            self.fill(path, offset, [room])

        try:
            yield fill
        finally:
            if fd is not None:
                self._io.close(fd)

    def _directly(self, path: Path, read: Callable[[int], Result]) -> Result | None:
        """None where this file cannot be read that way."""
        fd = self._open_direct(path) if self.direct else None
        if fd is None:
            return None
        try:
            return read(fd)
        except OSError as error:
            if error.errno not in _REFUSALS:  # such as a file whose end was cut within a block
                raise
            return None
        finally:
            self._io.close(fd)

    def _open_direct(self, path: Path) -> int | None:
        try:
            return self._io.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self.direct = False
            return None

    def _read_blocks(self, fd: int, offset: int, size: int) -> memoryview:
        begin = offset // ALIGN * ALIGN
        room = memoryview(mmap.mmap(-1, aligned(offset + size) - begin))
        self._io.read_at(fd, [room], begin)
        return room[offset - begin : offset - begin + size]

    def _read_buffered(self, path: Path, offset: int, rooms: list[Room]) -> None:
        fd = self._io.open(path, os.O_RDONLY)
        try:
            self._io.read_at(fd, rooms, offset)
        finally:
            self._io.close(fd)


def _aligned(offset: int, rooms: Sequence[memoryview]) -> bool:
    """Whether the disk can write there by itself: whole blocks, at places that are multiples of one."""
    if offset % ALIGN or any(room.nbytes % ALIGN for room in rooms):
        return False
    return not any(ctypes.addressof(ctypes.c_char.from_buffer(room)) % ALIGN for room in rooms)
