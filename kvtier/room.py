"""The budget of the NVMe tier: what lies in the directory, and what goes when more must fit."""

from __future__ import annotations

from kvtier.counts import Tally
from kvtier.files import SegmentFiles
from kvtier.index import SegmentIndex
from kvtier.segments import footprint


class Room:
    """Under the store's writer lock."""

    def __init__(
        self, files: SegmentFiles, index: SegmentIndex, tally: Tally, budget_bytes: int, stored_bytes: int
    ) -> None:
        self._files, self._index, self._tally = files, index, tally
        self._budget_bytes, self._stored_bytes = budget_bytes, stored_bytes

    def used_bytes(self) -> int:
        """Segments, foreign ones, quarantine, and what could not be removed."""
        return self._index.size_bytes() + self._files.quarantine.size_bytes() + self._files.debris_bytes()

    def fits(self, pages: int) -> bool:
        """Whether a segment of so many pages fits as things are."""
        return self.used_bytes() + footprint(pages, self._stored_bytes) <= self._budget_bytes

    def trim(self) -> None:
        """Evicts until the budget is met, as far as that is possible."""
        while self.used_bytes() > self._budget_bytes and self._evict_one(set()):
            pass

    def make(self, pages: int, keep: set[str]) -> int:
        """How many of the pages fit in one segment, after evicting what may go."""
        while pages and footprint(pages, self._stored_bytes) > self._budget_bytes:
            pages -= 1
        used = self.used_bytes()
        while pages and used + footprint(pages, self._stored_bytes) > self._budget_bytes:
            freed = self._evict_one(keep)
            used -= freed
            if not freed:
                pages -= 1
        return pages

    def _evict_one(self, keep: set[str]) -> int:
        """Removes one segment; bytes freed, 0 where nothing may go."""
        if self._files.hold_lease():
            for segment_id, size_bytes in self._index.victims(keep):
                if self.remove(segment_id, "evicted"):
                    return size_bytes
        return 0

    def remove(self, segment_id: str, reason: str) -> bool:
        """A segment and its live pages, which are counted under `reason`. False where the disk refuses."""
        if not self._files.remove_segment(segment_id):
            self._tally.add("io_errors")
            return False
        self._tally.add(reason, self._index.forget(segment_id))
        return True
