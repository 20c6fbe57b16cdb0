"""The file behind the host tier: fixed slots in shared memory, one process at a time.

    file   = file header (4096 B) | slot | slot | ...
    slot   = slot header (256 B) | payload (page_bytes, padded to 256 B)

A slot's header is zero while the slot is free or being written, and is written last; so after a kill at
any point a slot is either whole or free. The file is read and written by `preadv`/`pwritev`, not through
a mapping: the copy runs without the interpreter's lock, and a full /dev/shm is an OSError where a
mapping would end the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from kvtier.errors import TierBusyError, TierConfigError
from kvtier.fileops import Buffer, Io, Room
from kvtier.keys import layout_fingerprint
from kvtier.slots import (
    FILE_HEADER_BYTES,
    FREE,
    SLOT_HEADER_BYTES,
    VERSION,
    Slot,
    decode_slot,
    encode_file_header,
    encode_slot,
    stride_of,
)


class ArenaFile:
    """Slots by number. No index here; OSError passes through."""

    def __init__(self, path: Path, budget_bytes: int, page_bytes: int, fingerprint: bytes, io: Io) -> None:
        self._path, self._io, self._page_bytes = path, io, page_bytes
        self.stride = stride_of(page_bytes)
        self.slots = (budget_bytes - FILE_HEADER_BYTES) // self.stride
        if self.slots < 1:
            least = FILE_HEADER_BYTES + self.stride
            raise TierConfigError(
                f"host_bytes is {budget_bytes}; one page needs {least}. Raise it, or use 0 for no tier"
            )
        self._header = encode_file_header(page_bytes, layout_fingerprint(fingerprint, page_bytes, VERSION))
        self._fd = self._open_locked()

    def _open_locked(self) -> int:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = self._io.open(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise TierConfigError(f"the host arena {self._path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._io.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise TierConfigError(f"the host arena {self._path} cannot be locked: {error.strerror}") from error
            raise TierBusyError(
                f"another engine holds the host arena {self._path}; stop it or give this one another path"
            ) from error
        return fd

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._io.close(self._fd)

    def prepare(self) -> tuple[int, bool]:
        """Gives the file its header and size. How many slots were there before, and whether it was foreign."""
        size = self.size_bytes()
        found = bytearray(FILE_HEADER_BYTES)
        self._io.read_at(self._fd, [found], 0)
        foreign = found != self._header and size > 0
        if foreign:  # another model's or release's pages: never misread, only replaced
            self._io.truncate(self._fd, 0)
        if found != self._header:
            size = 0
        self._io.truncate(self._fd, FILE_HEADER_BYTES + self.slots * self.stride)
        self._io.write_at(self._fd, [self._header], 0)
        return min(self.slots, max(0, size - FILE_HEADER_BYTES) // self.stride), foreign

    def size_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def _offset(self, index: int) -> int:
        return FILE_HEADER_BYTES + index * self.stride

    def look(self, index: int) -> tuple[bool, Slot | None]:
        """Whether a slot is free, and what its header says; (False, None) where that is not whole."""
        raw = bytearray(SLOT_HEADER_BYTES)
        self._io.read_at(self._fd, [raw], self._offset(index))
        return raw == FREE, decode_slot(bytes(raw), index, self._page_bytes)

    def read_payload(self, index: int, room: Room) -> None:
        """Into `room`, which has the length of a page."""
        self._io.read_at(self._fd, [room], self._offset(index) + SLOT_HEADER_BYTES)

    def write(self, slot: Slot, payload: Buffer) -> None:
        """Payload, then header."""
        self._io.write_at(self._fd, [payload], self._offset(slot.index) + SLOT_HEADER_BYTES)
        self._io.write_at(self._fd, [encode_slot(slot, self._page_bytes)], self._offset(slot.index))

    def clear(self, index: int) -> None:
        self._io.write_at(self._fd, [FREE], self._offset(index))
