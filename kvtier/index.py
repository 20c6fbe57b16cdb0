"""Which segments a process knows, which of their pages live, and which segment was used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.errors import TierIntegrityError
from kvtier.segment import Header, runs


@dataclass(slots=True)
class Held:
    """A segment in the index; `live` are the rows that still count, `settled` whether the disk says the same."""

    header: Header
    live: set[int]
    manifest_bytes: int
    settled: bool = True

    @property
    def id(self) -> str:
        return self.header.segment_id

    @property
    def size_bytes(self) -> int:
        return self.header.segment_bytes + self.manifest_bytes


class SegmentIndex:
    """Every method is atomic; none touches a file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[str, Held] = OrderedDict()  # least recently used first
        self._places: dict[bytes, tuple[str, int]] = {}
        self._foreign: dict[str, int] = {}  # segments of another model or layout: bytes, no pages

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._places

    def __len__(self) -> int:
        with self._lock:
            return len(self._places)

    def keys(self) -> set[bytes]:
        with self._lock:
            return set(self._places)

    def segments(self) -> list[Held]:
        """Least recently used first."""
        with self._lock:
            return list(self._held.values())

    def known(self, suffix: str) -> set[str]:
        """Ids, foreign ones included, that end in `suffix`."""
        with self._lock:
            return {one for one in (*self._held, *self._foreign) if one.endswith(suffix)}

    def suffixes(self) -> set[str]:
        """The last two digits of every known id, which name its folder."""
        with self._lock:
            return {one[-2:] for one in (*self._held, *self._foreign)}

    def foreign(self) -> dict[str, int]:
        """Ids of segments that are not ours to read, with their bytes."""
        with self._lock:
            return dict(self._foreign)

    def size_bytes(self) -> int:
        with self._lock:
            return sum(one.size_bytes for one in self._held.values()) + sum(self._foreign.values())

    def holds(self, held: Held) -> bool:
        with self._lock:
            return self._held.get(held.id) is held

    def is_current(self, held: Held, row: int) -> bool:
        with self._lock:
            return self._held.get(held.id) is held and row in held.live

    def victims(self, keep: set[str]) -> list[tuple[str, int]]:
        """What may go, with its bytes: foreign segments, oldest first, then the least recently used."""
        with self._lock:
            own = [(one.id, one.size_bytes) for one in self._held.values() if one.id not in keep]
            return [*sorted(self._foreign.items()), *own]

    def add(self, held: Held) -> set[int]:
        """Enters live rows. A key that another segment already has dies in this one; returns those rows."""
        rows = held.header.rows
        with self._lock:
            doubles = {row for row in held.live if rows[row][0] in self._places}
            held.live -= doubles
            held.settled = held.settled and not doubles
            self._held[held.id] = held
            self._places.update({rows[row][0]: (held.id, row) for row in held.live})
            return doubles

    def add_foreign(self, segment_id: str, size_bytes: int) -> None:
        with self._lock:
            self._foreign[segment_id] = size_bytes

    def clear(self) -> None:
        """The directory is not the one that this was about."""
        with self._lock:
            self._held.clear()
            self._places.clear()
            self._foreign.clear()

    def forget(self, segment_id: str) -> int:
        """How many live pages that cost."""
        with self._lock:
            self._foreign.pop(segment_id, None)
            held = self._held.pop(segment_id, None)
            if held is None:
                return 0
            for row in held.live:
                del self._places[held.header.rows[row][0]]
            return len(held.live)

    def kill(self, held: Held, rows: Iterable[int]) -> None:
        """These rows of a segment are dead from now on."""
        with self._lock:
            held.settled = False
            for row in rows:
                held.live.discard(row)
                self._places.pop(held.header.rows[row][0], None)

    def touch(self, keys: Iterable[bytes]) -> set[str]:
        """Ids of segments that hold any of the keys; they become the most recently used."""
        with self._lock:
            found = {self._places[key][0] for key in keys if key in self._places}
            for segment_id in found:
                self._held.move_to_end(segment_id)
            return found

    def locate(self, keys: Iterable[bytes]) -> list[tuple[Held, list[int]]]:
        """Per segment, the rows of those keys that are known, sorted."""
        found: dict[str, list[int]] = {}
        with self._lock:
            for key in keys:
                if (place := self._places.get(key)) is not None:
                    found.setdefault(place[0], []).append(place[1])
            return [(self._held[segment_id], sorted(rows)) for segment_id, rows in found.items()]

    def plan(self, keys: set[bytes], longest: int) -> list[tuple[Held, range]]:
        """Reads of at most `longest` neighbouring rows each."""
        self.touch(keys)
        return [(held, run) for held, rows in self.locate(keys) for run in runs(rows, longest)]

    def check(self) -> None:
        """Places = live rows of held segments."""
        with self._lock:
            live = {held.header.rows[row][0]: (held.id, row) for held in self._held.values() for row in held.live}
            if live != self._places:
                raise TierIntegrityError(f"NVMe: {len(live)} live pages, {len(self._places)} in the index")
