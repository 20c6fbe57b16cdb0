"""How long a session may wait for its sandbox, how many spares that takes, and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import BadSpec

MOST_SPARES = 256


@dataclass(frozen=True)
class Budget:
    """`cold_start_s`: how long a session may wait for its sandbox; `miss`: the share of claims that may wait longer;
    `most`: how many spares there may be in all (0: none)."""

    cold_start_s: float = 0.1
    miss: float = 0.001
    most: int = 4

    def __post_init__(self) -> None:
        if self.cold_start_s < 0 or not 0 < self.miss < 1 or not 0 <= self.most <= MOST_SPARES:
            raise BadSpec(f"a budget has cold_start_s >= 0, 0 < miss < 1 and most from 0 to {MOST_SPARES}")


def spares(rate_hz: float, start_s: float, miss: float) -> int:
    """The least k with P(Poisson(rate_hz * start_s) >= k) <= miss: claims that come while one spare is replaced."""
    mean = rate_hz * start_s
    term = math.exp(-mean)
    tail, count = 1.0, 0
    while tail > miss and count < 10_000:
        tail -= term
        count += 1
        term *= mean / count
    return count


@dataclass(frozen=True)
class Figures:
    """What the pool has done and has. Times in seconds; None before there is one."""

    budget: Budget
    ready: int
    starting: int
    wanted: int
    claims: int
    misses: int
    late: int  # misses that took longer than the budget allows
    start_s: float | None  # the slowest of nine in ten late starts
    failure: str | None  # why the last start failed, while none has succeeded since

    def as_json(self) -> dict[str, object]:
        return {
            "cold_start_ms": round(self.budget.cold_start_s * 1000, 3), "miss_budget": self.budget.miss,
            "most": self.budget.most, "ready": self.ready, "starting": self.starting, "wanted": self.wanted,
            "claims": self.claims, "misses": self.misses, "late": self.late,
            "start_ms": None if self.start_s is None else round(self.start_s * 1000, 1), "failure": self.failure,
        }  # fmt: skip
