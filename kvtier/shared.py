"""The shared tier: one blob per page, created once, found by any machine, removed by one of them.

    pages/3f/KEY      a segment of one page
    marks/KEY         this page may go: content `dead`, or `bad` where it did not verify
    claims/KEY        somebody wants a marked page after all
    lease/N           who may remove (see `lease`)

Two writers of one page: one creates it, the other finds it there. Nobody overwrites, so a reader gets a whole
page or none. What is lost in a race between a put and a removal is a page, which is a miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvtier.blob import PageBlobs
from kvtier.codec import PageForm
from kvtier.collect import Collected, Collector, References, key_of, page_name
from kvtier.config import SharedConfig
from kvtier.counts import Tally, TierCounts
from kvtier.errors import ForeignError, FormatError, NoKeyError, TierConfigError, UndecodableError
from kvtier.fileops import Buffer
from kvtier.known import SharedIndex, Why
from kvtier.objects import Objects
from kvtier.reads import Threads
from kvtier.segment import payload_offset, segment_bytes
from kvtier.store import fill
from kvtier.values import Filled, Stored, Wanted

_LOW_WATER = 0.9  # of the budget: removing is slow, so it goes a little further than it must


Fetched: TypeAlias = Buffer | Why | None


class SharedStore:
    """See `PageStore`. `writer` orders changes; reads do not take it."""

    def __init__(
        self,
        objects: Objects,
        config: SharedConfig,
        form: PageForm,
        threads: Threads,
        references: References | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_bytes, self._budget, self._refresh_s = form.page_bytes, config.budget_bytes, config.refresh_s
        self._footprint, self._least_bytes = segment_bytes(1, form.codec.most_stored_bytes), payload_offset(1)
        if self._budget < self._footprint:
            raise TierConfigError(
                f"shared.budget_bytes is {self._budget}; one page needs {self._footprint}. Raise it, or share nothing"
            )
        self.objects, self._readers, self._pool, self._clock = objects, threads.readers, threads.pool, clock
        self._blobs = PageBlobs(form)
        self._doubtful: set[bytes] = set()  # pages whose creation failed: they may lie there all the same
        self._owed: set[bytes] = set()  # pages whose deletion failed
        self._collector = Collector(objects, config, clock, references)
        self.writer = threading.RLock()
        self._index = SharedIndex()
        self._tally = Tally()
        self._listed_at = self._collected_at = float("-inf")
        self._collect_s = config.grace_s / 2  # a round costs several requests, and deletions come often
        self.refresh()
        self._tally.add("adopted", len(self.keys()))

    def close(self) -> None:
        with self.writer:
            self._collector.close()
            self.objects.close()

    # --- what lies there -----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Lists the store. Where that fails, what is known stands."""
        with self.writer:
            self._listed_at = self._clock()
            try:
                found = {key: size for name, size in self.objects.list("pages/") if (key := key_of(name))}
                marked = {key for name, _ in self.objects.list("marks/") if (key := key_of(name))}
            except OSError:
                self._tally.add("io_errors")
                return
            self._index.replace(found, marked)
            short = [key for key, size in found.items() if size < self._least_bytes]
            for key in short:
                if self._index.why(key) is None:
                    self._hide_bad(key, Why.BAD)

    def _refresh_if_old(self) -> None:
        if self._clock() - self._listed_at >= self._refresh_s:
            self.refresh()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return self._index.lookup(keys)

    def keys(self) -> set[bytes]:
        return self._index.keys()

    def sizes(self) -> dict[bytes, int]:
        """Everything that is known to lie there, also what is not served, with its bytes."""
        return self._index.sizes()

    # --- reading -------------------------------------------------------------------------------------

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Buffer]:
        """Asks the store also for keys that the last listing did not have."""
        wanted = list(dict.fromkeys(keys))
        asked = [key for key in wanted if self._index.why(key) is None]
        found: dict[bytes, Buffer] = {}
        for key, (fetched, size) in zip(asked, self._fetch_all(asked), strict=True):
            if isinstance(fetched, Why):
                self._hide_bad(key, fetched)
            elif fetched is not None:
                found[key] = fetched
                self._index.enter(key, size)
            elif size == 0:
                self._index.forget(key)
        self._tally.add("hits", len(found))
        self._tally.add("misses", len(wanted) - len(found))
        return found

    def read_into(self, wanted: Sequence[Wanted]) -> Filled:
        """A blob comes whole, so a page is copied from it; on this thread, so that none is ever late."""
        return fill(wanted, self.get(key for key, _ in wanted))

    def _fetch_all(self, keys: Sequence[bytes]) -> list[tuple[Fetched, int]]:
        answers: list[tuple[Fetched, int]] = []
        for answer in self._readers.map(self._fetch, keys):
            if answer is None:
                self._tally.add("timeouts")
            answers.append((None, -1) if answer is None else answer)
        return answers

    def _fetch(self, key: bytes) -> tuple[Fetched, int]:
        """A page or why there is none, and the blob's size: 0 where none lies there, -1 where nobody can tell."""
        try:
            raw = self.objects.read(page_name(key))
        except OSError:
            self._tally.add("io_errors")
            return None, -1
        if raw is None:
            return None, 0
        try:
            return self._blobs.decode(key, raw), len(raw)
        except FormatError:
            return Why.BAD, len(raw)
        except (ForeignError, UndecodableError):
            return Why.UNREADABLE, len(raw)

    def _hide_bad(self, key: bytes, why: Why) -> None:
        self._tally.add("quarantined" if why is Why.BAD else "undecodable")
        self._index.hide(key, why)
        if why is Why.BAD:
            self._mark([key], why)

    # --- writing -------------------------------------------------------------------------------------

    def put(
        self, pages: Sequence[tuple[bytes, Buffer]], *, epoch: int, salt_id: bytes, beside: Sequence[bytes] = ()
    ) -> Stored:
        with self.writer:
            self._refresh_if_old()
            self._index.touch([*(key for key, _ in pages), *beside])
            fresh = [page for page, here in zip(pages, self.lookup([key for key, _ in pages]), strict=True) if not here]
            present, written, detail = len(pages) - len(fresh), 0, ""
            room = self._room(len(fresh), {*(key for key, _ in pages), *beside})
            if room < len(fresh):
                detail = f"the shared budget of {self._budget} bytes is used up until marked pages may go"
            for made, text in self._pool.map(lambda page: self._store(page, epoch, salt_id), fresh[:room]):
                present, written = present + (made is not None), written + (made is True)
                detail = text or detail
            self._tally.add("stored", written)
            return Stored(present, written, detail)

    def _store(self, page: tuple[bytes, Buffer], epoch: int, salt_id: bytes) -> tuple[bool | None, str]:
        """True where it was created, False where it was there, None with the reason where it is not there."""
        key, payload = page
        try:
            blob = self._blobs.encode(key, payload, epoch, salt_id)
        except NoKeyError as error:
            return None, str(error)
        try:
            created = self.objects.create(page_name(key), blob.parts)
            if not created and not self._claim(key):
                return None, "a page of this key lies there that cannot be read; it may be put again once it is gone"
        except OSError as error:
            self._tally.add("io_errors")
            self._doubtful.add(key)
            return None, f"a page could not be shared: {error.strerror or error}"
        self._doubtful.discard(key)
        self._owed.discard(key)
        self._index.enter(key, blob.size_bytes)
        if created:
            self._tally.add("coded_bytes", memoryview(payload).nbytes)
            self._tally.add("stored_bytes", blob.stored_bytes)
        return created, ""

    def _claim(self, key: bytes) -> bool:
        """A page that was there already: makes sure that it stays, if it was marked. False where it is no good."""
        why = self._index.why(key)
        return why not in (Why.BAD, Why.UNREADABLE) and self._collector.claim(key)

    # --- making room and deleting --------------------------------------------------------------------

    def _room(self, pages: int, keep: set[bytes]) -> int:
        """How many pages fit. Where not all do, the least recently used are marked, to go after the grace."""
        free = self._budget - self._index.used_bytes()
        if pages * self._footprint <= free:
            return pages
        self.collect()
        free = self._budget - self._index.used_bytes()
        if pages * self._footprint > free:
            self._mark_oldest(pages * self._footprint - free + int((1 - _LOW_WATER) * self._budget), keep)
        return max(0, min(pages, free // self._footprint))

    def _mark_oldest(self, wanted: int, keep: set[bytes]) -> None:
        self._tally.add("evicted", self._mark(self._index.oldest(wanted, keep), Why.DEAD))

    def delete(self, keys: Iterable[bytes]) -> int | None:
        """They are not served here from now on, and lie there until the holder of the lease collects them."""
        with self.writer:
            self._refresh_if_old()
            distinct = list(dict.fromkeys(keys))
            known = [key for key, here in zip(distinct, self.lookup(distinct), strict=True) if here]
            gone = self._mark(known, Why.DEAD)
            self._tally.add("deleted", gone)
            self._owed.update(key for key in distinct if key in self._doubtful or self._index.why(key) is None)
            self._pay()
            if self._clock() - self._collected_at >= self._collect_s:
                self.collect()
            return gone

    def _pay(self) -> None:
        """Marks what should have been deleted and could not be, or what a write that failed may have left there."""
        owed = [key for key in self._owed if key in self._doubtful or self.lookup([key])[0]]
        self._mark(owed, Why.DEAD)
        self._owed = {key for key in owed if self._index.why(key) is None}
        self._doubtful.difference_update(set(owed) - self._owed)

    def _mark(self, keys: Sequence[bytes], why: Why) -> int:
        marked = 0
        for key in keys:
            try:
                self._collector.mark(key, why.value.encode())
            except OSError:
                self._tally.add("io_errors")
                continue
            marked += 1
            self._index.hide(key, why)
        return marked

    def collect(self) -> Collected:
        """Removes what was marked long enough ago, if this process holds the lease."""
        with self.writer:
            self._pay()
            self._collected_at = self._clock()
            try:
                done = self._collector.collect()
            except OSError:
                self._tally.add("io_errors")
                return Collected()
            for key in done.removed:
                self._index.forget(key)
            for key in done.spared:
                self._index.show(key)
            self._tally.add("swept", done.strays)
            return done

    def discard_blob(self, name: str) -> bool:
        """Removes something that is no page, if this process holds the lease."""
        try:
            return self._collector.discard(name)
        except OSError:
            return False

    # --- accounts ------------------------------------------------------------------------------------

    def counts(self) -> TierCounts:
        return self._tally.counts(len(self.keys()), self._index.used_bytes(), self._budget)

    def check_integrity(self) -> None:
        """The accounts in themselves, without a request: what lies there is others' to change. See `audit` for that."""
        self._index.check()
