"""The NVMe tier: an index over segments, a budget over everything in the directory.

One put is one segment (or several, when large). The unit of eviction is the segment, least recently used
first; the unit of deletion is the page: the manifest is rewritten without it, a segment without live
pages is removed, one that is more than half dead is rewritten.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from kvtier.census import Census
from kvtier.codec import PageForm
from kvtier.counts import Tally, TierCounts
from kvtier.direct import SpanReader
from kvtier.errors import NoKeyError, TierConfigError, TierIntegrityError
from kvtier.fileops import Buffer, Io
from kvtier.files import SegmentFiles
from kvtier.index import Held, SegmentIndex
from kvtier.reader import SegmentReader
from kvtier.reads import Threads
from kvtier.room import Room
from kvtier.runs import RunReader
from kvtier.segment import VERSION, encode_manifest, manifest_of
from kvtier.segments import SegmentWriter, footprint
from kvtier.speed import ReadSpeed, measure
from kvtier.stripes import Stripes
from kvtier.values import Filled, Stored, Wanted

_SEGMENT_BYTES: Final = 32 * 2**20
_SEGMENT_PAGES: Final = 1024
_QUARANTINE_SHARE: Final = 16


class NvmeStore:
    """See `PageStore`. `writer` orders changes, readers take no lock on files."""

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        form: PageForm,
        io: Io,
        threads: Threads,
        direct: bool = True,
    ) -> None:
        self.page_bytes = form.page_bytes
        if budget_bytes < (least := footprint(1, form.codec.most_stored_bytes)):
            raise TierConfigError(
                f"nvme_bytes is {budget_bytes}; one page needs {least}. Raise it, or use 0 for no tier"
            )
        self._budget = budget_bytes
        self.files = SegmentFiles(root, io, budget_bytes // _QUARANTINE_SHARE)
        self.runs = RunReader(self.files, SpanReader(io, direct), threads.readers, form.codec, form.page_bytes)
        self._segments = SegmentWriter(self.files, form, threads.pool)
        self.writer = threading.RLock()
        self.index = SegmentIndex()
        self._tally = Tally()
        self._room = Room(self.files, self.index, self._tally, budget_bytes, form.codec.most_stored_bytes)
        self._census = Census(self.files, self.index, form.layout(VERSION), form.codec, self._tally)
        self._reader = SegmentReader(
            self.files, self.index, self.runs, self._tally, self.writer, self._quarantine, self._lock_out
        )
        try:
            self._take_stock()
        except OSError as error:
            self.close()
            raise TierConfigError(f"the NVMe directory {root} cannot be read: {error}") from error
        self._tally.add("adopted", len(self.index))

    def _take_stock(self) -> None:
        """Before the first write: half files go, what is there is counted, and a smaller budget is met."""
        if self.files.hold_lease():
            self._tally.add("swept", self.files.sweep())
        for held in self._census.scan():
            self._enter(held)
        self._room.trim()

    def close(self) -> None:
        with self.writer:
            self.files.close()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.index for key in keys]

    def keys(self) -> set[bytes]:
        return self.index.keys()

    # --- what is on disk -----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Takes in what others changed, and tries again what the disk refused before."""
        self.files.clear_debris()
        for held in self.index.segments():
            if not held.settled:
                self._settle(held)
        for held in self._census.refresh():
            self._enter(held)
        self._room.trim()

    def _enter(self, held: Held) -> None:
        doubles = self.index.add(held)
        if doubles:  # so copies never pile up
            self._tally.add("swept", len(doubles))
            self._settle(held)

    def unlock(self) -> None:
        """The key ring has a new key: segments that could not be decoded are looked at again."""
        with self.writer:
            if self._census.unlock():
                self.refresh()

    def locked(self) -> dict[str, int]:
        """Segments that need a key which is not here, with their bytes. Under `writer`."""
        known, locked = self.index.foreign(), self._census.locked()
        return {segment_id: size for segment_id, size in known.items() if segment_id in locked}

    def remove_locked(self, segment_id: str) -> bool:
        return self._room.remove(segment_id, "deleted")

    # --- reading -------------------------------------------------------------------------------------

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Buffer]:
        """Neighbouring pages in one read; several reads in flight."""
        return self._reader.get(keys)

    def read_into(self, wanted: Sequence[Wanted]) -> Filled:
        """As `get`. Pages that are stored as they are go from the disk to their place without a copy in between."""
        return self._reader.read_into(wanted)

    def stream_into(self, wanted: Sequence[Wanted], stripes: Stripes) -> Filled | None:
        """As `read_into`, the first stripe of every page first. None, and nothing read, where that cannot be: a page is
        not here, or not stored as it is."""
        return self._reader.stream_into(wanted, stripes)

    def _lock_out(self, held: Held) -> None:
        self._census.lock(self.files.manifest_path(held.id))

    def _quarantine(self, held: Held, row: int) -> None:
        """A page that did not verify, unless its segment was removed while it was read."""
        with self.writer:
            if not self.index.is_current(held, row):
                return
            if not self.files.segment_path(held.id).exists():
                self.index.forget(held.id)  # another process deleted it: a miss, nothing is wrong
                return
            self._tally.add("quarantined")
            self.index.kill(held, [row])
            if self.files.hold_lease():
                self._keep_bad_page(held, row)
            self._settle(held)

    def _keep_bad_page(self, held: Held, row: int) -> None:
        if self._room.used_bytes() + held.header.rows[row][2] > self._budget:
            return
        try:
            self.files.quarantine.keep(f"{held.id}.{row}.page", self.runs.raw_in_time(held, range(row, row + 1)))
        except OSError:
            self._tally.add("io_errors")

    # --- writing -------------------------------------------------------------------------------------

    def put(
        self, pages: Sequence[tuple[bytes, Buffer]], *, epoch: int, salt_id: bytes, beside: Sequence[bytes] = ()
    ) -> Stored:
        """Durable when it returns. Makes room by removing the least recently used segments.

        Segments that hold one of these keys, or of the keys `beside` them, are not removed for it.
        """
        with self.writer, self.files.locks.turn() as mine:
            if not mine:
                return Stored(0, 0, "another process is writing into the NVMe directory")
            self.refresh()
            keep = self.index.touch([*(key for key, _ in pages), *beside])
            fresh = [page for page in pages if page[0] not in self.index]
            present, written, detail = len(pages) - len(fresh), 0, ""
            most = max(1, min(_SEGMENT_PAGES, _SEGMENT_BYTES // self.page_bytes))
            while written < len(fresh) and not detail:
                batch = fresh[written : written + most]
                room = self._room.make(len(batch), keep)
                if room < len(batch):
                    detail = f"the NVMe budget of {self._budget} bytes is used up"
                try:
                    keep |= self._write(batch[:room], epoch, salt_id)
                    written += room
                except NoKeyError as error:
                    detail = str(error)
                except OSError as error:
                    self._tally.add("io_errors")
                    detail = f"a segment could not be written: {error.strerror or error}"
            self._tally.add("stored", written)
            return Stored(present + written, written, detail)

    def _write(self, pages: Sequence[tuple[bytes, Buffer]], epoch: int, salt_id: bytes) -> set[str]:
        """The id of the new segment, if there was anything to write."""
        if not pages:
            return set()
        held = self._segments.write(pages, epoch, salt_id)
        self._enter(held)
        self._tally.add("coded_bytes", len(pages) * self.page_bytes)
        self._tally.add("stored_bytes", sum(size for _, _, size in held.header.rows))
        return {held.id}

    # --- deleting ------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[bytes]) -> int | None:
        """How many pages went; None where another process holds the right to delete.

        Their bytes stay unreadable in the segment until it is removed or rewritten.
        """
        with self.writer, self.files.locks.turn():
            if not self.files.hold_lease():
                return None
            self.refresh()
            gone = 0
            for held, rows in self.index.locate(set(keys)):
                self.index.kill(held, rows)
                gone += len(rows) if self._settle(held) else 0
            self._tally.add("deleted", gone)
            return gone

    def _settle(self, held: Held) -> bool:
        """Makes the disk agree that rows died: rewrite the manifest, or the segment, or remove it."""
        if not self.files.hold_lease():
            return False
        if not held.live:
            return self._room.remove(held.id, "deleted")
        manifest = manifest_of(held.header, held.live)
        try:
            self.files.write_manifest(manifest)
        except OSError:
            # No room for a manifest: the promise to delete is worth more than the pages that stay.
            self._tally.add("io_errors")
            return self._room.remove(held.id, "evicted")
        held.manifest_bytes, held.settled = len(encode_manifest(manifest)), True
        if 2 * len(held.live) < len(held.header.rows) and self.files.locks.in_turn:
            self._compact(held)
        return True

    def _compact(self, held: Held) -> None:
        """Rewrites the live pages. The manifest is already right, so a kill or an error in between costs nothing."""
        if not self._room.fits(len(held.live)):
            return
        live = len(held.live)
        try:
            rows, stored = self.runs.live(held)
            fresh = self._segments.write_again(held.header, rows, stored) if rows else None
        except OSError:
            self._tally.add("io_errors")
            return
        self._tally.add("quarantined", live - len(rows))
        self.index.forget(held.id)
        if fresh is not None:
            self._enter(fresh)
        if not self.files.remove_segment(held.id):
            self._tally.add("io_errors")
            self.index.add_foreign(held.id, held.size_bytes)  # counted, and the first to go

    def discard(self, held: Held, rows: Iterable[int]) -> None:
        """These rows are not what they should be: no longer served, and dead on disk. Under `writer`."""
        self.index.kill(held, rows)
        self._settle(held)

    # --- speed ---------------------------------------------------------------------------------------

    def measure(self, size_bytes: int) -> ReadSpeed | None:
        """Reads pages that are here if there are enough, otherwise a scratch file as large as the budget allows."""
        with self.writer:
            return measure(self.index, self.files, self.runs, size_bytes, self._budget - self._room.used_bytes())

    # --- accounts ------------------------------------------------------------------------------------

    def counts(self) -> TierCounts:
        with self.writer:
            return self._tally.counts(len(self.index), self._room.used_bytes(), self._budget)

    def check_integrity(self) -> None:
        """Index = live rows; every known file has the size that the accounts say; all within the budget."""
        with self.writer:
            self.refresh()
            self.index.check()
            for held in self.index.segments():
                segment = self.files.size(self.files.segment_path(held.id))
                manifest = self.files.size(self.files.manifest_path(held.id))
                if (segment, manifest) != (held.header.segment_bytes, held.manifest_bytes):
                    raise TierIntegrityError(f"NVMe: the files of segment {held.id} have other sizes")
            if (used := self._room.used_bytes()) > self._budget:
                raise TierIntegrityError(f"NVMe: {used} bytes are used of {self._budget}")
