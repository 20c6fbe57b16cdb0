"""Requests between admission and their first step: what of their prompt is here, what comes from the tiers, and how
long they wait for it. Runs on the compute thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.ahead import RunsAhead
from engine.backends.face import Logits
from engine.facts import PAGE_SIZE
from engine.live import Live, account
from engine.metrics import Metrics
from engine.observer import Observer, Return
from engine.request import Phase
from engine.restore import Search, adopt, below, has_hole, missing, search
from engine.scheduler import Scheduler
from engine.spans import Spans
from engine.store import KvStore, salt_id
from engine.transfers import Page, Transfers, Waiter
from kvtier import Tier

RESTORE_DEADLINE_S = 10.0


class Restores:
    """Brings an admitted request to where it can run."""

    def __init__(
        self,
        store: KvStore,
        scheduler: Scheduler,
        told: tuple[Metrics, Spans],
        clock: Callable[[], float],
        sample: Callable[[Live, Logits], None],
    ) -> None:
        self._store, self._clock, self._sample = store, clock, sample
        self._metrics, self._spans = told
        self.observer = Observer()
        self._ahead = RunsAhead(store, scheduler)

    def begin(self, live: Live, others: Iterable[Live]) -> None:
        """Find what the prompt already has; ask the tiers for the rest."""
        request, store = live.request, self._store
        live.admitted_s = self._clock()
        self._metrics.queue_s.observe(live.admitted_s - live.queued_s)
        live.waited.queue_s += live.admitted_s - live.queued_s
        found = search(request, store.pool, [other.request for other in others])
        request.claimed_pages = len(found.held)
        live.search = found
        self.observer.admitted(request.spec.session, -(-len(request.tokens) // PAGE_SIZE) - len(found.held))
        if store.transfers is None or not missing(found):
            self._finish(live)
            return
        live.restore_until_s = live.admitted_s + RESTORE_DEADLINE_S
        pages = self._below(live, found)
        stale = found.returning and has_hole(found, pages)
        if not (stale and store.transfers.refresh(lambda: self._fetch(live, found, self._below(live, found)))):
            self._fetch(live, found, pages)

    def give_up_overdue(self, lives: Iterable[Live]) -> None:
        """Those whose time is up run with what has come; what comes later finds nobody waiting."""
        now = self._clock()
        for live in [live for live in lives if live.search is not None and live.restore_until_s < now]:
            self._store.counters.restore_timeouts += 1
            self._finish(live)

    def drop(self, live: Live) -> None:
        """The request ends, or goes back to the queue, before it ran."""
        found = self._stop_waiting(live)
        if found is not None:
            self._ahead.discard(found)
            self._store.pool.release(found.held.values())
            found.held.clear()

    def _below(self, live: Live, found: Search) -> list[Page]:
        """What the tiers could bring; nothing where it is computed again sooner than it is read."""
        tiers = self._store.transfers
        pages = [] if tiers is None else below(tiers, found, salt_id(live.request.spec.salt))
        if tiers is None or not pages or self.observer.pays(_tokens(tiers, pages), len(found.held) * PAGE_SIZE):
            return pages
        found.tail_below = None
        return []

    def _fetch(self, live: Live, found: Search, pages: Sequence[Page]) -> None:
        tiers = self._store.transfers
        if live.search is not found or tiers is None:
            return
        found.waiter = Waiter(lambda _: self._landed(live, found), found.held)
        if self._ahead.pays(live, found, pages):
            found.ahead = self._ahead.run(live, found, pages)
        else:
            tiers.begin(pages, found.waiter)
        self._landed(live, found)

    def _landed(self, live: Live, found: Search) -> None:
        """Some pages have come, or turned out not to."""
        waiter = found.waiter
        assert waiter is not None
        fresh = len(found.ahead.fresh) if found.ahead is not None else 0
        live.request.claimed_pages = len(found.held) + waiter.taking + fresh
        if not waiter.waiting:
            self._finish(live)

    def _finish(self, live: Live) -> None:
        request = live.request
        found = self._stop_waiting(live)
        assert found is not None
        sources = adopt(request, found, self._store)
        self._store.used([*found.keys, *(tail.key for tail in (found.tail, found.tail_below) if tail is not None)])
        logits = self._ahead.settle(request, found)
        now = self._clock()
        self._metrics.restore_s.observe(now - live.admitted_s)
        tiers = {tier.value: count for tier, count in sources.by_tier().items()}
        self._spans.running(live.waited, now - live.admitted_s, tiers)
        kind = "resumed" if live.running_s else "prefill"
        if not live.first_token_s:
            live.running_s = now  # a preempted one that has its first token keeps the time that led to it
        request.phase = Phase.RUNNING
        live.account = account(request, sources, self._store.counters)
        what = Return(sources, live.account["recomputed"], now - live.admitted_s)
        self.observer.returned(request.spec.session, what)
        live.sink({"type": kind, "request_id": request.spec.request_id, **live.account})
        if logits is not None:
            self._sample(live, logits)

    def _stop_waiting(self, live: Live) -> Search | None:
        found, live.search = live.search, None
        if found is not None and found.waiter is not None and self._store.transfers is not None:
            self._store.transfers.give_up(found.waiter)
        return found


def _tokens(tiers: Transfers, pages: Sequence[Page]) -> dict[Tier, int]:
    """Tokens of these pages, by the nearest tier that has them."""
    counts: dict[Tier, int] = {}
    for page, place in zip(pages, tiers.lookup([page.key for page in pages]), strict=True):
        if place is not None:
            counts[place] = counts.get(place, 0) + page.rows
    return counts
