"""Pages of running requests on their way to the host tier, so that most are clean when a tool starts or a request is
sent back. Runs on the compute thread, after a step that only decoded.

A bucket holds seconds: a share of each step's time goes in, what a copy took goes out, on this thread and on the
writer's. A copy begins once there is as much in it as the last one took, so a batch is slowed by no more than the
share, whatever a copy costs.
Copies that somebody waits for go first, and no page of another session is evicted for one that is still in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.facts import PAGE_SIZE
from engine.request import Request
from engine.store import KvStore, salt_id
from kvtier import Tier

SHARE = 0.02  # of a step's time
MOST_SAVED_S = 0.01  # what a bucket holds: an engine that had nothing to copy does not do it all at once
FIRST_COST_S = 0.001  # of a page, until one has been copied


class WriteBehind:
    """One page is on its way at a time."""

    def __init__(self, store: KvStore, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._saved_s, self._cost_s = 0.0, FIRST_COST_S
        self._flying = False

    def after_decoding(self, step_s: float, running: Iterable[Request]) -> None:
        """A step without prefill took so long."""
        self._saved_s = min(max(MOST_SAVED_S, self._cost_s), self._saved_s + SHARE * step_s)
        store = self._store
        if store.copies is None or store.stack is None or self._flying or self._saved_s < self._cost_s:
            return
        if store.copies.waits or store.stack.host_room() < 1:
            return
        for request in running:
            if self._copy_next(request):
                return

    def _copy_next(self, request: Request) -> bool:
        """The first whole page of a request that no tier has. False where there is none."""
        pool, copies = self._store.pool, self._store.copies
        assert copies is not None
        keys = request.keys
        while request.clean_pages < len(keys) and pool.is_clean(keys[request.clean_pages]):
            request.clean_pages += 1
        if request.clean_pages == len(keys):
            return False
        key = keys[request.clean_pages]
        block = pool.find(key)
        if block is None or key in copies.staged:  # dropped by another session that had it too, or being copied
            return False
        began_s, written_s = self._clock(), copies.written_s

        def landed(present: int, _: int) -> None:
            self._flying = False
            self._cost_s = snapshot_s + copies.written_s - written_s
            self._saved_s -= self._cost_s
            self._store.counters.written_behind += present

        self._flying = True
        copied = self._store.backend.gather([(block, PAGE_SIZE)])
        snapshot_s = self._clock() - began_s
        copies.send([key], copied, Tier.HOST, request.spec.epoch, salt_id(request.spec.salt), landed)
        return True
