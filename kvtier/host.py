"""The host tier: fixed slots in a shared-memory file that outlives its process.

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
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path

from kvtier.errors import TierBusyError, TierConfigError, TierIntegrityError
from kvtier.fileops import Buffer, Io
from kvtier.keys import layout_fingerprint, page_digest
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
from kvtier.values import Stored, TierCounts


class HostArena:
    """Pages in one locked file. Thread-safe: `_writer` orders changes, `_lock` guards the index."""

    def __init__(
        self, path: Path, budget_bytes: int, page_bytes: int, fingerprint: bytes, io: Io, pool: Executor
    ) -> None:
        self.page_bytes = page_bytes
        self._path, self._budget, self._io, self._pool = path, budget_bytes, io, pool
        self._stride = stride_of(page_bytes)
        self.slots = (budget_bytes - FILE_HEADER_BYTES) // self._stride
        if self.slots < 1:
            least = FILE_HEADER_BYTES + self._stride
            raise TierConfigError(
                f"host_bytes is {budget_bytes}; one page needs {least}. Raise it, or use 0 for no tier"
            )
        self._layout = layout_fingerprint(fingerprint, page_bytes, VERSION)
        self._writer, self._lock = threading.Lock(), threading.Lock()
        self._index: OrderedDict[bytes, Slot] = OrderedDict()  # least recently used first
        self._free: list[int] = []
        self._retired: set[int] = set()  # slots whose header could not be cleared
        self._stamp = 0
        self._counts: Counter[str] = Counter()
        self._fd = self._open_locked()
        try:
            self._adopt()
        except OSError as error:
            self._io.close(self._fd)
            raise TierConfigError(f"the host arena {path} cannot be used: {error}") from error

    # --- opening -------------------------------------------------------------------------------------

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

    def _adopt(self) -> None:
        header = encode_file_header(self.page_bytes, self._layout)
        size = os.fstat(self._fd).st_size
        found = bytearray(FILE_HEADER_BYTES)
        self._io.read_at(self._fd, [found], 0)
        if found != header:
            if size:  # another model's or release's pages: never misread, only replaced
                self._counts["foreign"] += 1
                self._io.truncate(self._fd, 0)
            size = 0
        self._io.truncate(self._fd, FILE_HEADER_BYTES + self.slots * self._stride)
        self._io.write_at(self._fd, [header], 0)
        old_slots = min(self.slots, max(0, size - FILE_HEADER_BYTES) // self._stride)
        self._scan(old_slots)

    def _scan(self, old_slots: int) -> None:
        """Rebuilds the index from the headers; the newest copy of a key wins."""
        seen: dict[bytes, Slot] = {}
        taken: set[int] = set()
        for index in range(old_slots):
            raw = bytearray(SLOT_HEADER_BYTES)
            self._io.read_at(self._fd, [raw], self._offset(index))
            if raw == FREE:
                continue
            slot = decode_slot(bytes(raw), index, self.page_bytes)
            if slot is None or slot.key in seen:
                self._counts["quarantined" if slot is None else "swept"] += 1
                self._io.write_at(self._fd, [FREE], self._offset(index))
                continue
            seen[slot.key] = slot
            taken.add(index)
        for slot in sorted(seen.values(), key=lambda one: one.stamp):
            self._index[slot.key] = slot
            self._stamp = slot.stamp + 1
        self._free = [index for index in range(self.slots) if index not in taken]
        self._counts["adopted"] = len(self._index)

    def _offset(self, index: int) -> int:
        return FILE_HEADER_BYTES + index * self._stride

    # --- reading -------------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._index

    def keys(self) -> set[bytes]:
        with self._lock:
            return set(self._index)

    def find(self, key: bytes) -> Slot | None:
        """The slot of a key, which becomes the most recently used."""
        with self._lock:
            slot = self._index.get(key)
            if slot is not None:
                self._index.move_to_end(key)
            return slot

    def read(self, keys: Iterable[bytes]) -> dict[bytes, bytearray]:
        """Verified copies of the pages that are here; a page that does not verify is dropped and counted."""
        wanted = set(keys)
        slots = [slot for key in wanted if (slot := self.find(key)) is not None]
        found: dict[bytes, bytearray] = {}
        # Only copies and digests run in the pool; what needs `_writer` runs here, or a put that waits
        # for the pool could wait for readers that wait for the put.
        for slot, payload in zip(slots, self._pool.map(self._read, slots), strict=True):
            if payload is not None:
                found[slot.key] = payload
            else:
                self._quarantine(slot)
        self._count("hits", len(found))
        self._count("misses", len(wanted) - len(found))
        return found

    def _read(self, slot: Slot) -> bytearray | None:
        payload = bytearray(self.page_bytes)
        try:
            self._io.read_at(self._fd, [payload], self._offset(slot.index) + SLOT_HEADER_BYTES)
        except OSError:
            self._count("io_errors")
            return None
        return payload if page_digest(slot.key, slot.salt_id, payload) == slot.digest else None

    def _quarantine(self, slot: Slot) -> None:
        """A slot that was reused while it was read is no longer the index's, and not counted."""
        with self._writer:
            if self._drop(slot):
                self._count("quarantined")

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    # --- changing ------------------------------------------------------------------------------------

    def put(self, pages: Sequence[tuple[bytes, Buffer]], *, epoch: int, salt_id: bytes) -> Stored:
        """Writes the pages that are not here yet, least recently used ones making room."""
        with self._writer:
            present = [key for key, _ in pages if self.find(key) is not None]  # touched, so evicted last
            keep = {key for key, _ in pages}
            known, work = set(present), []
            for key, payload in pages:
                if key in known:
                    continue
                index = self._take_slot(keep)
                if index is None:
                    break
                known.add(key)
                self._stamp += 1
                work.append((Slot(index, self._stamp, epoch, key, b"", salt_id), payload))
            outcomes = list(self._pool.map(self._write, work))
            slots = [slot for slot in outcomes if slot is not None]
            with self._lock:  # in the order of the call, whichever copy finished first
                self._index.update({slot.key: slot for slot in slots})
            written, failed = len(slots), len(outcomes) - len(slots)
            self._count("stored", written)
            detail = f"{failed} pages could not be written to the host arena" if failed else ""
            if not detail and len(present) + written < len(pages):
                detail = f"the host tier holds {self.slots} pages"
            return Stored(len(present) + written, written, detail)

    def _write(self, item: tuple[Slot, Buffer]) -> Slot | None:
        """Payload, then header; the slot once it is whole."""
        bare, payload = item
        slot = Slot(
            bare.index,
            bare.stamp,
            bare.epoch,
            bare.key,
            page_digest(bare.key, bare.salt_id, payload),
            bare.salt_id,
        )
        try:
            self._io.write_at(self._fd, [payload], self._offset(slot.index) + SLOT_HEADER_BYTES)
            self._io.write_at(self._fd, [encode_slot(slot, self.page_bytes)], self._offset(slot.index))
        except OSError:
            self._count("io_errors")
            self._give_back(slot.index)
            return None
        return slot

    def _take_slot(self, keep: set[bytes]) -> int | None:
        while not self._free:
            with self._lock:
                victim = next((slot for key, slot in self._index.items() if key not in keep), None)
            if victim is None:
                return None
            self._drop(victim)
            self._count("evicted")
        return self._free.pop()

    def delete(self, keys: Iterable[bytes]) -> int:
        with self._writer:
            with self._lock:
                slots = [self._index[key] for key in set(keys) if key in self._index]
            dropped = sum(self._drop(slot) for slot in slots)
            self._count("deleted", dropped)
            return dropped

    def _drop(self, slot: Slot) -> bool:
        """Forgets a slot, if the index still means this one. Under `_writer`."""
        with self._lock:
            if self._index.get(slot.key) is not slot:
                return False
            del self._index[slot.key]
        self._give_back(slot.index)
        return True

    def _give_back(self, index: int) -> None:
        try:
            self._io.write_at(self._fd, [FREE], self._offset(index))
        except OSError:  # a header that may still read as valid must not be reused before it is cleared
            self._count("io_errors")
            with self._lock:
                self._retired.add(index)
            return
        with self._lock:
            self._free.append(index)

    # --- accounts ------------------------------------------------------------------------------------

    def counts(self) -> TierCounts:
        with self._lock:
            used = FILE_HEADER_BYTES + len(self._index) * self._stride
            return TierCounts(pages=len(self._index), used_bytes=used, budget_bytes=self._budget, **self._counts)

    def check_integrity(self) -> None:
        """free + retired + indexed = all, and every indexed slot's header says what the index says."""
        with self._writer, self._lock:
            indexed = [slot.index for slot in self._index.values()]
            places = sorted([*indexed, *self._free, *self._retired])
            if places != list(range(self.slots)):
                raise TierIntegrityError(
                    f"host arena: {len(indexed)} used, {len(self._free)} free, {len(self._retired)} retired "
                    f"of {self.slots} slots"
                )
            for slot in self._index.values():
                raw = bytearray(SLOT_HEADER_BYTES)
                self._io.read_at(self._fd, [raw], self._offset(slot.index))
                if decode_slot(bytes(raw), slot.index, self.page_bytes) != slot:
                    raise TierIntegrityError(f"host arena: the header of slot {slot.index} is not the index's")
            if os.fstat(self._fd).st_size > self._budget:
                raise TierIntegrityError("host arena: the file is larger than its budget")

    def close(self) -> None:
        with self._writer, contextlib.suppress(OSError):
            self._io.close(self._fd)
