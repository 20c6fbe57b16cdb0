"""What the engine measures of itself: histograms with fixed bounds, cheap enough for every token.

Times are in seconds. Bounds are powers of two, so two engines' histograms add up, and a quantile is right to a factor
of two at worst; it is interpolated inside its bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

TIME_BOUNDS_S = tuple(2.0**-n for n in range(13, -8, -1))  # 0.12 ms .. 128 s
COUNT_BOUNDS = tuple(2.0**n for n in range(13))  # 1 .. 4096
QUANTILES = (0.5, 0.95, 0.99)


class Histogram:
    """Counts by upper bound, the last one for what exceeds all bounds. Not thread-safe."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._count = 0
        self._greatest = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value
        self._count += 1
        self._greatest = max(self._greatest, value)

    def quantile(self, share: float) -> float | None:
        """The value below which `share` of the observations lie; None without observations."""
        if not self._count:
            return None
        wanted, seen = share * self._count, 0
        for index, count in enumerate(self._counts):
            if count and seen + count >= wanted:
                low = self._bounds[index - 1] if index else 0.0
                high = min(self._bounds[index] if index < len(self._bounds) else self._greatest, self._greatest)
                return low + (max(high, low) - low) * (wanted - seen) / count
            seen += count
        return self._greatest

    def as_message(self) -> dict[str, Any]:
        """`buckets` counts observations up to each bound; what is above the last is in `count` alone."""
        running, buckets = 0, []
        for bound, count in zip(self._bounds, self._counts, strict=False):
            running += count
            buckets.append([bound, running])
        named = {f"p{round(100 * share)}": self.quantile(share) for share in QUANTILES}
        return {"count": self._count, "sum": self._total, "max": self._greatest, **named, "buckets": buckets}


def _times() -> Histogram:
    return Histogram(TIME_BOUNDS_S)


def _counts() -> Histogram:
    return Histogram(COUNT_BOUNDS)


@dataclass
class Metrics:
    """queue_s:          from arrival to admission, and from preemption to the next one
    restore_s:        from admission until the pages are there
    first_token_s:    from arrival to the first token
    inter_token_s:    between two tokens of one generation, waits included
    step_s:           one step of the model
    batch:            requests that decode in a step
    prefill_tokens:   tokens of prefill in a step that has any
    draft_s:          finding drafts for a step that verifies some
    verified_tokens:  tokens that a verification brought to one request
    """

    queue_s: Histogram = field(default_factory=_times)
    restore_s: Histogram = field(default_factory=_times)
    first_token_s: Histogram = field(default_factory=_times)
    inter_token_s: Histogram = field(default_factory=_times)
    step_s: Histogram = field(default_factory=_times)
    batch: Histogram = field(default_factory=_counts)
    prefill_tokens: Histogram = field(default_factory=_counts)
    draft_s: Histogram = field(default_factory=_times)
    verified_tokens: Histogram = field(default_factory=_counts)

    def as_message(self) -> dict[str, Any]:
        return {name: histogram.as_message() for name, histogram in vars(self).items()}
