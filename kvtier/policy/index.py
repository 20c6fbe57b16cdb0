"""The arithmetic of keeping: what a byte held for a second is worth."""

from __future__ import annotations

import numpy as np

from kvtier.policy.survival import EDGES, Array, Survival
from kvtier.policy.values import Prefill, TierView


def keep_rate(survival: Survival, wait_s: float = 0.0) -> Array:
    """How soon a pause pays, per second: one number for each time already elapsed (EDGES[:-1]).

    Keeping KV for at most t more seconds costs `price * bytes * E[min(d, t)]` and saves `saving * P(d <= t)`, with d
    what is left of the pause; a return then waits `wait_s` more for the device, still holding its bytes. The price at
    which keeping and not keeping are equal, for the best t, is `saving / bytes` times

        max over t of P(d <= t) / (E[min(d, t)] + wait_s * P(d <= t)).

    This is Gittins' index of the pause (Gittins 1979; for sizes unknown: Aalto, Ayesta and Righter 2009). Where hazard
    falls it is the hazard itself, and equal sessions are ranked as LRU would; where d is known it is 1 / (d + wait_s).
    A pause that has outlived everything known is due at once.
    """
    alive = survival.at
    widths = np.diff(EDGES)
    # [k]: area under S up to edge k
    area = np.concatenate([[0.0], np.cumsum((alive[:-1] + alive[1:]) / 2 * widths)])
    gone = alive[:-1, None] - alive[None, :]  # [elapsed, t]
    held = area[None, :] - area[:-1, None] + wait_s * gone
    later = np.arange(len(EDGES))[None, :] > np.arange(len(EDGES) - 1)[:, None]
    best: Array = np.where(later, gone / np.maximum(held, 1e-12), 0.0).max(axis=1)
    overdue: Array = np.full(len(best), 1 / max(wait_s, 1e-3))
    return np.where(alive[:-1] > 0, best, overdue)


def mean_left_s(survival: Survival) -> Array:
    """E[d - e | d > e] for each elapsed e in EDGES[:-1], seconds; 0 where nothing survives."""
    alive = survival.at
    pieces = (alive[:-1] + alive[1:]) / 2 * np.diff(EDGES)
    ahead = np.cumsum(pieces[::-1])[::-1]
    left: Array = np.where(alive[:-1] > 0, ahead / np.maximum(alive[:-1], 1e-300), 0.0)
    return left


def best_ttl_s(survival: Survival, saving_s: float, cost_per_s: float) -> float:
    """The t that maximises `saving_s * P(d <= t) - cost_per_s * E[min(d, t)]`, seconds.

    With `cost_per_s` 1 and `saving_s` = Q*eta + R(C) this has the form of Continuum's time to live (section 4.1), whose
    cost is t itself instead of E[min(d, t)]; with a hazard that is infinite at one moment it is a fixed TTL.
    """
    alive = survival.at
    area = np.concatenate([[0.0], np.cumsum((alive[:-1] + alive[1:]) / 2 * np.diff(EDGES))])
    return float(EDGES[int(np.argmax(saving_s * (1 - alive) - cost_per_s * area))])


def break_even_tokens(prefill: Prefill, tier: TierView, bytes_per_token: int, longest: int = 1 << 20) -> int | None:
    """The least length from which reading back beats computing again; None where no length up to `longest` does.

    Reading takes `latency + n*bytes/bandwidth`, and the device pays its tax for writing and reading; computing takes
    `prefill(n)`. Their difference is convex in n and not positive at 0, so it changes sign at most once.
    """

    def pays(tokens: int) -> bool:
        size = tokens * bytes_per_token
        cost_s = tier.read_s(size) + tier.tax * (tier.read_s(size) + tier.write_s(size))
        return cost_s < prefill.seconds(tokens)

    if not pays(longest):
        return None
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
