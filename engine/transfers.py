"""Reads from the tiers, shared: a page that one reader is fetching is waited for by the next, not fetched again; one
that is still being written is taken from the copy that waits to be written.

Used by the readers' threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from kvtier import Loaded, Tier, TierStack

WAIT_S = 10.0
Flying = dict[bytes, Future[Loaded | None]]


class Transfers:
    """A stack as readers see it. Thread-safe. `staged` holds pages until some time after a tier has them."""

    def __init__(self, stack: TierStack, staged: Mapping[bytes, bytes]) -> None:
        self._stack = stack
        self._staged = staged
        self._lock = threading.Lock()
        self._flying: Flying = {}
        self.joined = 0  # pages that came with another reader's transfer

    def lookup(self, keys: Sequence[bytes]) -> list[Tier | None]:
        written_soon = [Tier.HOST if key in self._staged else None for key in keys]
        return [place or soon for place, soon in zip(self._stack.lookup(keys), written_soon, strict=True)]

    def refresh(self) -> bool:
        """List the shared store anew. False where there is none."""
        if self._stack.config.shared is None:
            return False
        self._stack.refresh()
        return True

    def get(self, keys: Sequence[bytes]) -> list[Loaded | None]:
        """As `TierStack.get`. A transfer that another reader began and does not end in WAIT_S is a miss."""
        waiting = {key: self._staged.get(key) for key in keys}
        found: dict[bytes, Loaded | None] = {key: Loaded(page, Tier.HOST) for key, page in waiting.items() if page}
        mine, theirs = self._claim([key for key in keys if key not in found])
        try:
            if mine:
                found.update(zip(mine, self._stack.get(list(mine)), strict=True))
        finally:
            self._land(mine, found)
        for key, flying in theirs.items():
            found[key] = _wait(flying)
        return [found.get(key) for key in keys]

    def _claim(
        self, keys: Sequence[bytes]
    ) -> tuple[dict[bytes, Future[Loaded | None]], dict[bytes, Future[Loaded | None]]]:
        with self._lock:
            theirs = {key: self._flying[key] for key in keys if key in self._flying}
            mine: Flying = {key: Future() for key in keys if key not in theirs}
            self._flying |= mine
            self.joined += len(theirs)
        return mine, theirs

    def _land(self, mine: Flying, found: dict[bytes, Loaded | None]) -> None:
        with self._lock:
            for key in mine:
                del self._flying[key]
        for key, flying in mine.items():
            flying.set_result(found.get(key))


def _wait(flying: Future[Loaded | None]) -> Loaded | None:
    try:
        return flying.result(WAIT_S)
    except TimeoutError:
        return None
