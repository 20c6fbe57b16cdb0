"""Reads past the page cache: into aligned memory, in whole blocks, where the file system allows it.

A tier's pages are read once and then live on the device or the host; keeping them in the page cache as well would
spend memory that no budget counts.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Final

from kvtier.fileops import Io
from kvtier.segment import ALIGN, aligned

_REFUSALS: Final = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class SpanReader:
    """Thread-safe. `direct` says how it reads; it is given up for good where a file cannot be opened that way."""

    def __init__(self, io: Io, direct: bool) -> None:
        self._io, self.direct = io, direct and hasattr(os, "O_DIRECT")

    def read(self, path: Path, offset: int, size: int) -> memoryview:
        """Exactly `size` bytes, the caller's own; what a short file lacks is zero, and will not verify."""
        if self.direct:
            fd = self._open_direct(path)
            if fd is not None:
                try:
                    return self._read_blocks(fd, offset, size)
                except OSError as error:
                    if error.errno not in _REFUSALS:  # such as a file whose end was cut within a block
                        raise
                finally:
                    self._io.close(fd)
        return self._read_buffered(path, offset, size)

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

    def _read_buffered(self, path: Path, offset: int, size: int) -> memoryview:
        room = bytearray(size)
        fd = self._io.open(path, os.O_RDONLY)
        try:
            self._io.read_at(fd, [room], offset)
        finally:
            self._io.close(fd)
        return memoryview(room)
