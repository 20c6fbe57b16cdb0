"""Whether the books of a running engine add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.errors import PageError
from engine.live import Live
from engine.scheduler import Scheduler
from engine.store import KvStore


def check(store: KvStore, scheduler: Scheduler, lives: Sequence[Live]) -> None:
    """Raise PageError unless every reference to a page has a holder that is known, none is missing, and the scheduler
    and the core know the same requests."""
    pool = store.pool
    pool.check_integrity()
    held = [block for live in lives for block in live.request.blocks]
    held += [block for live in lives if live.search is not None for block in live.search.held.values()]
    held += [block for record in store.sessions.all() for block in record.pinned_blocks]
    held += [
        block for live in lives if live.search is not None and live.search.ahead for block in live.search.ahead.fresh
    ]
    held += store.transfers.blocks() if store.transfers is not None else []
    if store.pinned_pages != len({block for record in store.sessions.all() for block in record.pinned_blocks}):
        raise PageError("the count of pinned pages is not that of the sessions' pins")
    counted = Counter(held)
    if any(pool.refs(block) != counted[block] for block in range(pool.total)):
        raise PageError("the references to some page are not those of its holders")
    if {id(live.request) for live in lives} != {id(request) for request in scheduler.requests()}:
        raise PageError("the scheduler and the core do not know the same requests")
