"""What an engine without pages says of itself, in the words of one that has them: the same fields, and nothing held."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Final

from engine.metrics import Metrics
from engine.spans import Spans
from engine.store import Counters

NO_PAGES: Final[dict[str, int]] = {"total": 0, "free": 0, "cached_clean": 0, "cached_dirty": 0, "held": 0}
MOST_RUNNING: Final = 256  # what a connection may prepare at once; the server has limits of its own


class Figures:
    """`counters` count the server's tokens, as it says them."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.counters = Counters()
        self.requests = 0
        self.refused = 0
        self.lost = 0

    def note(self, usage: dict[str, Any]) -> None:
        self.requests += 1
        self.counters.prefix_hit_tokens += usage["cached_tokens"]
        self.counters.computed_tokens += max(0, usage["prompt_tokens"] - usage["cached_tokens"])

    def stats(self, running: int, sessions: int) -> dict[str, Any]:
        return {
            "pool": dict(NO_PAGES),
            "pinned_pages": 0,
            "owed_pages": 0,
            "waste": {"allocated_tokens": 0, "used_tokens": 0},
            "metrics": self.metrics.as_message(),
            "speculation": None,
            "waiting": 0,
            "running": running,
            "sessions": sessions,
            "steps": self.requests,
            "counters": {**asdict(self.counters), "copied_out": 0},
            "external": {"requests": self.requests, "refused": self.refused, "lost": self.lost},
            "io_failures": 0,
            "overdue_writes": 0,
            "tiers": {},
            "quarantined": 0,
            "integrity": "ok",
        }

    def spans(self) -> dict[str, Any]:
        told = Spans().as_message(time.monotonic())
        return {"spans": told, "memory": None, "limits": {"running": MOST_RUNNING, "pool_pages": 0}}
