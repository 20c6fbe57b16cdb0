"""Pins: a session's pages held on the device, all of them or ranges, until they are released or their time runs out."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.core import EngineCore
from engine.decisions import Decision
from engine.keeper import Keeper
from engine.kvcall import KvCall
from engine.sessions import SessionKv


class Pins:
    """Runs on the compute thread, between steps."""

    def __init__(self, core: EngineCore, keeper: Keeper) -> None:
        self._core = core
        self._store = core.store
        self._keeper = keeper
        self._open: dict[str, tuple[Decision, float]] = {}  # the open entry of a pin, and since when it holds
        core.timers.append(self._end_due)

    def pin(self, record: SessionKv, call: KvCall, answer: Callable[..., None]) -> None:
        if not record.pinned_blocks:
            self.unpin(record)  # one that was taken away meanwhile
        wanted = call.keys_of(record.keys)
        if call.tokens is None:
            record.pinned_only = None
        elif not record.pinned:
            record.pinned_only = set(wanted)
        elif record.pinned_only is not None:
            record.pinned_only.update(wanted)
        self._store.pin(record, len(record.pinned_blocks) + self._core.scheduler.spare_pages, wanted)
        blocks = set(record.pinned_blocks)
        held = sum(self._store.pool.find(key) in blocks for key in wanted)
        record.pin_until_s = None if call.ttl_s is None else time.monotonic() + call.ttl_s
        if call.pause is not None:
            self._keeper.waits(record, call)
        short = len(wanted) - held
        size = held * self._store.page_bytes
        if held and record.name not in self._open:
            self._open[record.name] = (self._keeper.journal.asked(record, call, "device"), time.monotonic())
        if short > 0 or not wanted:
            answer("clipped" if held else "missing", held, size, f"{short} pages are not on the device or have no room")
        else:
            answer("accepted", held, size)

    def unpin_range(self, record: SessionKv, call: KvCall) -> int:
        """Stop keeping a part; the rest stays held. Returns how many pages were let go."""
        let_go, blocks = set(call.keys_of(record.keys)), set(record.pinned_blocks)
        rest = [key for key in record.keys if key not in let_go and self._store.pool.find(key) in blocks]
        if not rest:
            return self.unpin(record)
        if record.pinned_only is None:
            record.pinned_only = set(record.keys)
        record.pinned_only -= let_go
        self._store.unpin(record)
        return len(blocks) - self._store.pin(record, len(blocks), rest)

    def unpin(self, record: SessionKv) -> int:
        record.pinned, record.pinned_only, record.pin_until_s = False, None, None
        entry, since_s = self._open.pop(record.name, (None, 0.0))
        held = self._store.unpin(record)
        if entry is not None:
            left = "" if held else "it had been taken away before"
            self._keeper.decisions.settle(entry, 0.0, "done", left or f"held for {time.monotonic() - since_s:.1f} s")
        return held

    def _end_due(self, now: float) -> float | None:
        """Pins whose time has run out. Seconds until the next is due."""
        dues = [record for record in self._store.sessions.all() if record.pin_until_s is not None]
        for record in dues:
            if record.pin_until_s is not None and record.pin_until_s <= now:
                self.unpin(record)
        left = [record.pin_until_s for record in dues if record.pin_until_s is not None]
        return min(left) - now if left else None
