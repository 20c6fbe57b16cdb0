"""A session's pages on their way down: copied to a tier in the background, freed where they are no longer needed.

Runs on the compute thread; slow parts go through the store's lanes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core import EngineCore
from engine.sessions import SessionKv
from kvtier import Receipt, Tier, TierStack

NO_TIERS = "this engine has no tiers below the device"


@dataclass(frozen=True)
class Moved:
    """What became of a move: a receipt. `bytes` were written; `seconds` from the first look to the last byte."""

    status: str
    pages: int = 0
    bytes: int = 0
    detail: str = ""
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        return self.status == "accepted"


Then = Callable[[Moved], None]
Queued = Callable[[int, int], None]  # pages that are to be copied, pages that are below already


class Moves:
    """Copies out and frees. One object serves intents and the policy."""

    def __init__(self, core: EngineCore) -> None:
        self._store = core.store

    def store(
        self,
        record: SessionKv,
        tier: Tier,
        epoch: int,
        then: Then,
        queued: Queued | None = None,
        only: Sequence[bytes] | None = None,
    ) -> None:
        """Copy the session's pages into `tier`. host and shared: the nearer copies stay. nvme: host copies go.

        `queued` comes first, when it is known what has to be copied; `then` comes once. `only`: these of its pages.
        """
        stack, copies = self._store.stack, self._store.copies
        if stack is None or copies is None:
            then(Moved("rejected", detail=NO_TIERS))
            return
        keys, begun = list(record.keys if only is None else only), time.monotonic()
        if not _has(stack, tier):
            then(Moved("rejected", detail=f"this engine has no {tier} tier"))
            return
        if not keys:
            then(Moved("missing", detail="the session has no pages" if only is None else "no page is in that range"))
            return

        def looked(places: list[Tier | None] | None) -> None:
            here = places or [None] * len(keys)
            for key, place in zip(keys, here, strict=True):
                self._store.pool.mark(key, clean=place is not None)  # what a tier has lost is dirty again
            below = sum(place is not None for place in here)

            def copied(stored: int, size: int) -> None:
                self._copied(record, keys, tier, epoch, (stored + below, size, begun), then)

            count = copies.add(keys, tier, epoch=epoch, salt_id=record.salt_id, session=record.name, then=copied)
            if queued is not None:
                queued(count, below)

        self._store.lanes.write(lambda: stack.lookup(keys), looked)

    def free_device(self, record: SessionKv, keys: Sequence[bytes]) -> int:
        """Forget the device copies of clean pages that are this session's alone and that nobody uses. Returns how
        many."""
        store, freed = self._store, 0
        for key in keys:
            block = store.pool.find(key)
            if block is None or store.pool.refs(block) or not store.pool.is_clean(key):
                continue
            if store.sessions.is_private(record, key):
                freed += store.forget(key)
        return freed

    def free_tier(self, record: SessionKv, tier: Tier, then: Then) -> None:
        """Delete from one tier the pages that are this session's alone."""
        stack, begun = self._store.stack, time.monotonic()
        keys = [key for key in record.keys if self._store.sessions.is_private(record, key)]
        if stack is None or not keys:
            then(Moved("missing", detail=NO_TIERS if stack is None else "no page is this session's alone"))
            return

        for key in keys:  # first, so that no device copy is dropped in the belief that there is another
            self._store.pool.mark(key, clean=False)

        def freed(result: tuple[int, list[Tier | None]] | None) -> None:
            count, places = result or (0, [None] * len(keys))
            for key, place in zip(keys, places, strict=True):
                self._store.pool.mark(key, clean=place is not None)
            seconds = time.monotonic() - begun
            then(Moved("accepted" if count else "missing", count, count * self._store.page_bytes, "", seconds))

        self._store.lanes.write(lambda: (stack.free(keys, tier), stack.lookup(keys)), freed)

    def _copied(
        self,
        record: SessionKv,
        keys: list[bytes],
        tier: Tier,
        epoch: int,
        so_far: tuple[int, int, float],
        then: Then,
    ) -> None:
        present, size, begun = so_far
        stack = self._store.stack
        assert stack is not None
        if tier is Tier.HOST:
            then(_of_copies(present, len(keys), size, time.monotonic() - begun))
            return
        move = stack.copy if tier is Tier.SHARED else stack.move

        def moved(receipt: Receipt | None) -> None:
            seconds = time.monotonic() - begun
            if receipt is None:
                detail = f"the {tier} tier could not be written; the pages stay where they are"
                then(Moved("rejected", detail=detail, seconds=seconds))
            else:
                then(Moved(receipt.status, receipt.pages, receipt.bytes + size, receipt.detail, seconds))

        self._store.lanes.write(
            lambda: move(keys, tier, epoch=epoch, salt_id=record.salt_id), moved, shared=tier is Tier.SHARED
        )


def _has(stack: TierStack, tier: Tier) -> bool:
    config = stack.config
    there = {Tier.HOST: config.host_path, Tier.NVME: config.nvme_dir, Tier.SHARED: config.shared}
    return there[tier] is not None


def _of_copies(present: int, total: int, size: int, seconds: float) -> Moved:
    if present >= total:
        return Moved("accepted", total, size, seconds=seconds)
    if present:
        detail = f"{total - present} pages are neither on the device nor below, or have no room there"
        return Moved("clipped", present, size, detail, seconds)
    return Moved("missing", detail="none of the session's pages could be found or kept", seconds=seconds)
