"""How long a tool takes, given how long it has taken."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

PER_DECADE = 12
"""Bins of duration: twelve to the decade, from a millisecond to eleven days."""
EDGES: Array = np.concatenate([[0.0], 10 ** np.linspace(-3, 6, 9 * PER_DECADE + 1)])
_EDGE_LIST = EDGES.tolist()
PRIOR_EVENTS = 0.25
"""Strength of the prior where no call was ever at risk, as a number of ended calls; it fades as calls were."""
SMOOTHING_BINS = 2.0
_SPREAD: Array = np.arange(-6, 7) / SMOOTHING_BINS
KERNEL: Array = np.exp(-0.5 * _SPREAD * _SPREAD)


def bin_of(seconds: float) -> int:
    return min(bisect.bisect_right(_EDGE_LIST, seconds) - 1, len(EDGES) - 2)


@dataclass(frozen=True)
class Survival:
    """S(t) = P(duration > t), on the grid.

    `at[k]` is S(EDGES[k]). Beyond the grid nothing survives.
    """

    at: Array

    @classmethod
    def point(cls, seconds: float) -> Survival:
        """Ends exactly then, to the grid's resolution: what a timeout alone says."""
        return cls((seconds > EDGES).astype(np.float64))

    @classmethod
    def from_hazard(cls, hazard: Array) -> Survival:
        """`hazard[k]`: ended calls per second at risk in bin k."""
        return cls(np.concatenate([[1.0], np.exp(-np.cumsum(hazard * np.diff(EDGES)))]))

    def capped(self, timeout_s: float | None) -> Survival:
        """The same, where nothing outlives the timeout."""
        return self if timeout_s is None else Survival(np.where(timeout_s > EDGES, self.at, 0.0))

    def __call__(self, seconds: float) -> float:
        return float(np.interp(seconds, EDGES, self.at))


@dataclass
class Durations:
    """Ended calls of one tool, and the time all its calls spent at risk, by bin.

    A call still running counts as at risk for as long as it ran and as not ended: it is censored, as in Kaplan and
    Meier (1958). Hazards are occurrence over exposure, the maximum-likelihood estimate where hazard is constant
    within a bin, which tends to Kaplan-Meier's as bins narrow.
    """

    events: Array = field(default_factory=lambda: np.zeros(len(EDGES) - 1))
    exposure: Array = field(default_factory=lambda: np.zeros(len(EDGES) - 1))
    ended: int = 0

    def add(self, seconds: float, seen_from_s: float = 0.0) -> None:
        """An ended call; what it did before it was first seen says nothing (left truncation)."""
        self.events[bin_of(seconds)] += 1
        self.exposure += at_risk([seconds]) - at_risk([seen_from_s])
        self.ended += 1

    def hazard(self, running: Iterable[tuple[float, float]], prior: Array | None = None) -> Array:
        """Per second. `running`: (elapsed, seen from), seconds, of the calls that have not ended.

        `prior`: the hazard believed where there is no evidence; without one, 1/t, which has no scale.
        """
        believed = 1 / EDGES[1:] if prior is None else prior
        spans = list(running)
        exposure = self.exposure + at_risk(elapsed for elapsed, _ in spans) - at_risk(begin for _, begin in spans)
        events, exposure = smooth(self.events), smooth(exposure)
        at_risk_here = exposure / smooth(np.diff(EDGES))
        prior_events = PRIOR_EVENTS / (1 + at_risk_here) ** 2
        hazard: Array = (events + prior_events) / (exposure + prior_events / np.maximum(believed, 1e-12))
        return hazard


def smooth(counts: Array) -> Array:
    """Each bin with its neighbours, Gaussian on the logarithmic grid: durations have no features finer than that."""
    return np.convolve(counts, KERNEL, mode="same")


def at_risk(durations_s: Iterable[float]) -> Array:
    """Seconds that calls of these durations spent in each bin."""
    durations = np.fromiter(durations_s, dtype=np.float64)
    if not len(durations):
        return np.zeros(len(EDGES) - 1)
    spent: Array = np.clip(durations[:, None] - EDGES[:-1], 0.0, np.diff(EDGES)).sum(axis=0)
    return spent


def kaplan_meier(ended_s: list[float], running_s: list[float], at_s: float) -> float:
    """The product-limit estimate of S(at_s) itself: what `Durations` is checked against."""
    alive = 1.0
    for moment in sorted(set(ended_s)):
        if moment > at_s:
            break
        risk = sum(d >= moment for d in ended_s) + sum(d >= moment for d in running_s)
        alive *= 1 - math.fsum(d == moment for d in ended_s) / risk
    return alive
