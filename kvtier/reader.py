"""Pages of segments for those who ask: which are read together, and what a read that brings none means."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from kvtier.counts import Tally
from kvtier.fileops import Buffer
from kvtier.files import SegmentFiles
from kvtier.index import Held, SegmentIndex
from kvtier.reads import came_back
from kvtier.runs import Bad, Landed, RunReader
from kvtier.stripes import Stripes, shares_of
from kvtier.values import Filled, Wanted


class SegmentReader:
    """Any thread. `damaged` is told of rows that do not verify, `locked` of segments that need another key. Nothing
    that runs in a pool takes `writer`, or a put that waits for the pool could wait for readers that wait for the put.
    """

    def __init__(
        self,
        files: SegmentFiles,
        index: SegmentIndex,
        runs: RunReader,
        tally: Tally,
        writer: threading.RLock,
        damaged: Callable[[Held, int], None],
        locked: Callable[[Held], None],
    ) -> None:
        self._files, self._index, self._runs, self._tally = files, index, runs, tally
        self._writer, self._damaged, self._locked = writer, damaged, locked

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Buffer]:
        """See `PageStore`."""
        wanted = set(keys)
        plan = self._index.plan(wanted, self._runs.pages)
        found: dict[bytes, Buffer] = {}
        for (held, rows), read in zip(plan, self._runs.fetch(plan), strict=True):
            if read is None:
                self._tally.add("timeouts", len(rows))
            else:
                self._take(held, rows, read, found)
        self._count(wanted, found)
        return found

    def read_into(self, wanted: Sequence[Wanted]) -> Filled:
        """See `PageStore`."""
        rooms = dict(wanted)
        plan = self._index.plan(set(rooms), self._runs.pages)
        found: dict[bytes, Buffer] = {}
        late: dict[bytes, Future[Any]] = {}
        for (held, rows), read in zip(plan, self._runs.land(plan, rooms), strict=True):
            if came_back(read):
                self._take(held, rows, read.result(), found)
                continue
            self._tally.add("timeouts", len(rows))
            if not read.cancelled():
                late |= {key: read for key, _, _ in held.header.rows[rows.start : rows.stop]}
        self._count(set(rooms), found)
        return Filled(set(found), late)

    def stream_into(self, wanted: Sequence[Wanted], stripes: Stripes) -> Filled | None:
        """As `read_into`, stripe by stripe. None, and nothing read, unless all of it is here as it is wanted."""
        keys = {key for key, _ in wanted}
        located = self._index.locate(keys)
        here = sum(len(rows) for _, rows in located)
        if here < len(keys) or not all(self._runs.is_plain(held, rows) for held, rows in located):
            return None
        self._index.touch(keys)
        shares = shares_of(located, wanted, self._runs.threads)
        found: dict[bytes, Buffer] = {}
        late: dict[bytes, Future[Any]] = {}
        for share, read in zip(shares, self._runs.land_striped(shares, stripes), strict=True):
            if not came_back(read):
                self._tally.add("timeouts", len(share))
                if not read.cancelled():
                    late |= {page.held.header.rows[page.row][0]: read for page in share}
                continue
            outcome = read.result()
            if isinstance(outcome, OSError):
                for held in {page.held.id: page.held for page in share}.values():
                    self._failed(held, outcome)
                continue
            for page, one in zip(share, outcome, strict=True):
                self._take(page.held, range(page.row, page.row + 1), [one], found)
        self._count(keys, found)
        return Filled(set(found), late)

    def _count(self, wanted: set[bytes], found: dict[bytes, Buffer]) -> None:
        self._tally.add("hits", len(found))
        self._tally.add("misses", len(wanted) - len(found))

    def _take(self, held: Held, rows: range, read: Landed, found: dict[bytes, Buffer]) -> None:
        if isinstance(read, OSError):
            self._failed(held, read)
            return
        for row, outcome in zip(rows, read, strict=True):
            if outcome is Bad.DAMAGED:
                self._damaged(held, row)
            elif outcome is Bad.UNDECODABLE:
                self._set_foreign(held)
                return
            else:
                found[held.header.rows[row][0]] = outcome

    def _failed(self, held: Held, error: OSError) -> None:
        """A segment that could not be read: a miss, and no longer in the index if it is not there."""
        if not isinstance(error, FileNotFoundError):
            self._tally.add("io_errors")
            return
        with self._writer:
            if not self._files.segment_path(held.id).exists():
                self._index.forget(held.id)

    def _set_foreign(self, held: Held) -> None:
        """Its key is gone: nothing of it can be read, here and now."""
        with self._writer:
            if self._index.holds(held):
                self._locked(held)
                self._tally.add("undecodable", self._index.forget(held.id))
                self._index.add_foreign(held.id, held.size_bytes)
