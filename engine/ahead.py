"""A step that runs ahead of its pages: new tokens are computed layer by layer while the pages before them come.

layers    0 ........ 8 ........ 16 ....... 24 ..... 30
reading   |==========|==========|=========|========|          stripes of layers of every page, hashed on the way
step         waits ->|=========.|========.|=======.|======>   never past a layer that has not come

What it computes is provisional until every page has verified: only then are its pages indexed and its logits sampled.
If one has not, the step is thrown away, counted, and the tokens from that page on are computed as if it had never been.
While it runs nothing else does, so it runs only for a request that is alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.face import Logits, cut
from engine.errors import ArrivalFailed
from engine.facts import PAGE_SIZE
from engine.live import Live
from engine.request import Request
from engine.restore import Ahead, Search
from engine.scheduler import Scheduler
from engine.store import KvStore
from engine.transfers import Page

AHEAD_TOKENS = 256  # of a step
LEAST_TOKENS = 16  # fewer are computed in less time than there is to win
LEAST_PAGES = 16
MOST_BYTES = 256 * 1024 * 1024  # to be read while the compute thread does nothing else


class RunsAhead:
    """On the compute thread."""

    def __init__(self, store: KvStore, scheduler: Scheduler) -> None:
        self._store, self._scheduler = store, scheduler

    def pays(self, live: Live, found: Search, pages: Sequence[Page]) -> bool:
        """Whether these pages are worth running ahead of, and nobody is held up by it."""
        store, tiers = self._store, self._store.transfers
        if tiers is None or not (store.backend.overlaps and store.lanes.idle and self._scheduler.admitted == 1):
            return False
        if not LEAST_PAGES <= len(pages) <= MOST_BYTES // store.page_bytes or not tiers.all_on_nvme(pages):
            return False
        start = _start(found, pages)
        if start is None or len(live.request.tokens) - start < LEAST_TOKENS:
            return False
        fresh = _pages(_end(live.request, start)) - _pages(start)
        return store.pool.available >= len(pages) + fresh

    def run(self, live: Live, found: Search, pages: Sequence[Page]) -> Ahead:
        """Begin to read, compute, and return when the step has ended; the pages are told of later."""
        store, request, start = self._store, live.request, _start(found, pages)
        assert store.transfers is not None
        assert found.waiter is not None
        assert start is not None
        arrival, coming = store.transfers.stream(pages, found.waiter)
        blocks = [found.held[key] if key in found.held else coming[key] for key in found.keys[: start // PAGE_SIZE]]
        if found.tail_below is not None:
            blocks.append(coming[found.tail_below.key])
        end = _end(request, start)
        ahead = Ahead(len(pages), start, end, [store.fresh() for _ in range(_pages(end) - len(blocks))])
        tiles = cut([*blocks, *ahead.fresh], start, request.tokens[start:end], end == len(request.tokens))
        try:
            logits = [row for row in store.backend.forward(tiles, arrival) if row is not None]
        except ArrivalFailed:
            return ahead
        ahead.ran = True
        ahead.logits = logits[0].copy() if logits else None  # other steps may come before the pages have verified
        return ahead

    def settle(self, request: Request, found: Search) -> Logits | None:
        """After the request has adopted what came: keep what was computed if all of it came. Logits to sample from."""
        ahead = found.ahead
        if ahead is None:
            return None
        came = len(found.waiter.tiers) if found.waiter is not None else 0
        if not ahead.ran or came < ahead.coming or request.computed != ahead.start:
            self.discard(found)
            self._store.counters.thrown_away += 1
            return None
        request.blocks += ahead.fresh
        request.computed = ahead.end
        self._store.filled(request, request.spec.salt)
        self._store.counters.ran_ahead += 1
        self._scheduler.served(request, ahead.end - ahead.start)
        return ahead.logits

    def discard(self, found: Search) -> None:
        """Give back what the step wrote."""
        if found.ahead is not None:
            self._store.pool.release(found.ahead.fresh)
            found.ahead.fresh = []


def _start(found: Search, pages: Sequence[Page]) -> int | None:
    """How many tokens are there once these pages are; None where the step would write into a page of others."""
    coming = {page.key for page in pages}
    whole = next(
        (i for i, key in enumerate(found.keys) if key not in found.held and key not in coming), len(found.keys)
    )
    if found.tail_below is not None:
        return whole * PAGE_SIZE + found.tail_below.rows
    return None if found.tail is not None and found.tail.page == whole else whole * PAGE_SIZE


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def _end(request: Request, start: int) -> int:
    end = start + AHEAD_TOKENS
    return len(request.tokens) if end >= len(request.tokens) else end // PAGE_SIZE * PAGE_SIZE
