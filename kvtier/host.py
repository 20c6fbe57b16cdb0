"""The host tier: an index over the slots of a shared-memory file that outlives its process (see `arena`)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from kvtier.arena import ArenaFile
from kvtier.counts import Tally, TierCounts
from kvtier.errors import TierConfigError, TierIntegrityError
from kvtier.fileops import Buffer, Io, Room
from kvtier.keys import page_digest
from kvtier.slots import FILE_HEADER_BYTES, Slot
from kvtier.values import Filled, Stored, Wanted

_SHARES: Final = 4  # of a read: one for each thread; pages one by one would cost more in futures than in bytes


class HostArena:
    """See `PageStore`. Pages in one locked file. `writer` orders changes, `_lock` guards the index."""

    def __init__(
        self, path: Path, budget_bytes: int, page_bytes: int, fingerprint: bytes, io: Io, pool: Executor
    ) -> None:
        self.page_bytes = page_bytes
        self._budget, self._pool = budget_bytes, pool
        self.file = ArenaFile(path, budget_bytes, page_bytes, fingerprint, io)
        self.slots = self.file.slots
        self.writer, self._lock = threading.Lock(), threading.Lock()
        self._index: OrderedDict[bytes, Slot] = OrderedDict()  # least recently used first
        self._free: list[int] = []
        self._retired: set[int] = set()  # slots whose header could not be cleared
        self._stamp = 0
        self._tally = Tally()
        try:
            self._adopt()
        except OSError as error:
            self.file.close()
            raise TierConfigError(f"the host arena {path} cannot be used: {error}") from error

    def _adopt(self) -> None:
        """Rebuilds the index from the headers; the newest copy of a key wins."""
        old_slots, foreign = self.file.prepare()
        self._tally.add("foreign", int(foreign))
        seen: dict[bytes, Slot] = {}
        taken: set[int] = set()
        for index in range(old_slots):
            free, slot = self.file.look(index)
            if free:
                continue
            if slot is None or slot.key in seen:
                self._tally.add("quarantined" if slot is None else "swept")
                self.file.clear(index)
                continue
            seen[slot.key] = slot
            taken.add(index)
        for slot in sorted(seen.values(), key=lambda one: one.stamp):
            self._index[slot.key] = slot
            self._stamp = slot.stamp + 1
        self._free = [index for index in range(self.slots) if index not in taken]
        self._tally.add("adopted", len(self._index))

    # --- reading -------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._index for key in keys]

    def keys(self) -> set[bytes]:
        with self._lock:
            return set(self._index)

    def room(self) -> int:
        """How many pages fit without another's going."""
        with self._lock:
            return len(self._free) + len(self._retired)

    def find(self, key: bytes) -> Slot | None:
        """The slot of a key, which becomes the most recently used."""
        with self._lock:
            slot = self._index.get(key)
            if slot is not None:
                self._index.move_to_end(key)
            return slot

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Buffer]:
        """A page that does not verify is dropped and counted."""
        wanted = list(dict.fromkeys(keys))
        here = self.lookup(wanted)
        rooms = {key: bytearray(self.page_bytes) for key, is_here in zip(wanted, here, strict=True) if is_here}
        self._tally.add("misses", len(wanted) - len(rooms))
        whole = self._fill(rooms)
        return {key: room for key, room in rooms.items() if key in whole}

    def read_into(self, wanted: Sequence[Wanted]) -> Filled:
        return Filled(self._fill(dict(wanted)))

    def _fill(self, rooms: Mapping[bytes, Room]) -> set[bytes]:
        """Which of these pages lie in their rooms, verified."""
        slots = [slot for key in rooms if (slot := self.find(key)) is not None]

        def read(share: int) -> list[bool]:
            return [self._read(slot, rooms[slot.key]) for slot in slots[share::_SHARES]]

        # Only copies and digests run in the pool; what needs `writer` runs here, or a put that waits
        # for the pool could wait for readers that wait for the put.
        shares = list(self._pool.map(read, range(min(_SHARES, len(slots)))))
        bad = [slot for at, slot in enumerate(slots) if not shares[at % _SHARES][at // _SHARES]]
        for slot in bad:
            self._quarantine(slot)
        found = {slot.key for slot in slots} - {slot.key for slot in bad}
        self._tally.add("hits", len(found))
        self._tally.add("misses", len(rooms) - len(found))
        return found

    def _read(self, slot: Slot, room: Room) -> bool:
        """Copies and hashes one page after the other, so that the digest finds it in the core's cache."""
        try:
            self.file.read_payload(slot.index, room)
        except OSError:
            self._tally.add("io_errors")
            return False
        return page_digest(slot.key, slot.salt_id, room) == slot.digest

    def _quarantine(self, slot: Slot) -> None:
        """A slot that was reused while it was read is no longer the index's, and not counted."""
        with self.writer:
            if self._drop(slot):
                self._tally.add("quarantined")

    # --- changing ------------------------------------------------------------------------------------

    def put(
        self, pages: Sequence[tuple[bytes, Buffer]], *, epoch: int, salt_id: bytes, beside: Sequence[bytes] = ()
    ) -> Stored:
        with self.writer:
            present = [key for key, _ in pages if self.find(key) is not None]  # touched, so evicted last
            keep = {*(key for key, _ in pages), *beside}
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
            self._tally.add("stored", written)
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
            self.file.write(slot, payload)
        except OSError:
            self._tally.add("io_errors")
            self._give_back(slot.index)
            return None
        return slot

    def _take_slot(self, keep: set[bytes]) -> int | None:
        with self._lock:
            retired, self._retired = self._retired, set()
        for index in retired:  # the medium may have come to itself
            self._give_back(index)
        while not self._free:
            with self._lock:
                victim = next((slot for key, slot in self._index.items() if key not in keep), None)
            if victim is None:
                return None
            self._drop(victim)
            self._tally.add("evicted")
        return self._free.pop()

    def delete(self, keys: Iterable[bytes]) -> int:
        with self.writer:
            with self._lock:
                slots = [self._index[key] for key in set(keys) if key in self._index]
            dropped = sum(self._drop(slot) for slot in slots)
            self._tally.add("deleted", dropped)
            return dropped

    def _drop(self, slot: Slot) -> bool:
        """Forgets a slot, if the index still means this one. Under `writer`."""
        with self._lock:
            if self._index.get(slot.key) is not slot:
                return False
            del self._index[slot.key]
        self._give_back(slot.index)
        return True

    def _give_back(self, index: int) -> None:
        try:
            self.file.clear(index)
        except OSError:  # a header that may still read as valid must not be reused before it is cleared
            self._tally.add("io_errors")
            with self._lock:
                self._retired.add(index)
            return
        with self._lock:
            self._free.append(index)

    # --- for an audit, under `writer` ----------------------------------------------------------------

    def by_slot(self) -> dict[int, Slot]:
        """The index by place."""
        with self._lock:
            return {slot.index: slot for slot in self._index.values()}

    def verifies(self, slot: Slot) -> bool:
        """Whether its payload is what it was."""
        return self._read(slot, bytearray(self.page_bytes))

    def free_slot(self, index: int) -> None:
        """Whatever lies there: it is forgotten and cleared."""
        slot = self.by_slot().get(index)
        if slot is not None:
            self._drop(slot)
        elif index not in self._free:
            with self._lock:
                self._retired.discard(index)
            self._give_back(index)
        else:
            self.file.clear(index)

    # --- accounts ------------------------------------------------------------------------------------

    def counts(self) -> TierCounts:
        with self._lock:
            used = FILE_HEADER_BYTES + len(self._index) * self.file.stride
            return self._tally.counts(len(self._index), used, self._budget)

    def check_integrity(self) -> None:
        """free + retired + indexed = all, and every indexed slot's header says what the index says."""
        with self.writer, self._lock:
            indexed = [slot.index for slot in self._index.values()]
            places = sorted([*indexed, *self._free, *self._retired])
            if places != list(range(self.slots)):
                raise TierIntegrityError(
                    f"host arena: {len(indexed)} used, {len(self._free)} free, {len(self._retired)} retired "
                    f"of {self.slots} slots"
                )
            for slot in self._index.values():
                if self.file.look(slot.index)[1] != slot:
                    raise TierIntegrityError(f"host arena: the header of slot {slot.index} is not the index's")
            if self.file.size_bytes() > self._budget:
                raise TierIntegrityError("host arena: the file is larger than its budget")

    def close(self) -> None:
        with self.writer:
            self.file.close()
