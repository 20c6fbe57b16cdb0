"""Collects the shared store now and then: what was marked long enough ago goes, where this process holds the lease."""

from __future__ import annotations

from engine.core import EngineCore

EVERY_S = 30.0


class Collector:
    """A timer of the core. The work is done in the lane that changes tiers."""

    def __init__(self, core: EngineCore, every_s: float = EVERY_S) -> None:
        self._store = core.store
        self._every_s = every_s
        self._due_s: float | None = None
        self._busy = False
        self.pages = 0  # removed so far
        if self._store.stack is not None and self._store.stack.config.shared is not None:
            core.timers.append(self.tick)

    def tick(self, now: float) -> float | None:
        """Seconds until the next collection is due; none while one is under way."""
        if self._busy:
            return None
        if self._due_s is None:
            self._due_s = now + self._every_s
        if now < self._due_s:
            return self._due_s - now
        stack = self._store.stack
        assert stack is not None
        self._busy = True
        self._store.lanes.write(lambda: len(stack.collect().removed), self._collected, shared=True)
        return None

    def _collected(self, removed: int | None) -> None:
        self._busy, self._due_s = False, None
        self.pages += removed or 0
