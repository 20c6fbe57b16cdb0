"""What a verification is worth: how many drafts a step takes, by what steps were seen to cost. No torch, no clock.

A step of B requests takes base(B) seconds and brings B tokens. With n drafts more it takes base(B) + extra(B, n) and
brings B + P, P being the sum of the chances that each draft stands with all before it. The n that brings the most
tokens a second is taken (Leviathan, Kalman and Matias 2023, section 3.3, for many requests at once), and none where
that is less than MARGIN better than none: so speculation is off by itself where it does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 1.04
MOST_ROWS = 64  # of drafts, in a step
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LEAST_SEEN = 4  # steps without drafts before the first with them
PROBE_EVERY = 64  # steps that drafts were left out of: one is tried with few of them, to see whether that still holds
PROBE_ROWS = 2
_FIRST_ROW = 0.05  # of the base, for each row, before anything is known
_FIRST_WEIGHT = 2.0  # of that, in observations
_NEW = 0.1  # weight of a new observation of the base
_KEPT = 0.97  # of what was known of rows, with each new observation
_OUTLIER = 3.0  # times what was expected: the machine was busy with something else


@dataclass
class _Seen:
    """What steps of one number of requests took, in seconds; of those with drafts, how much more than without, as sums
    for a straight line through them (each observation weighs less with every one after it)."""

    base_s: float = 0.0
    count: int = 0
    since: int = 0  # steps with drafts since the last one without
    left_out: int = 0
    weight: float = 0.0
    sum_n: float = 0.0
    sum_nn: float = 0.0
    sum_e: float = 0.0  # in parts of the base
    sum_ne: float = 0.0

    def saw(self, drafts: int, extra: float) -> None:
        self.weight = self.weight * _KEPT + 1.0
        self.sum_n = self.sum_n * _KEPT + drafts
        self.sum_nn = self.sum_nn * _KEPT + drafts * drafts
        self.sum_e = self.sum_e * _KEPT + extra
        self.sum_ne = self.sum_ne * _KEPT + drafts * extra

    def extra(self, drafts: int) -> float:
        """Parts of the base that so many drafts take beside it: never less than nothing, never less for more."""
        ahead = ((1, _FIRST_ROW), (8, 8 * _FIRST_ROW))  # what is believed before anything was seen
        weight = self.weight + _FIRST_WEIGHT
        half = _FIRST_WEIGHT / len(ahead)
        sum_n = self.sum_n + half * sum(n for n, _ in ahead)
        sum_nn = self.sum_nn + half * sum(n * n for n, _ in ahead)
        sum_e = self.sum_e + half * sum(e for _, e in ahead)
        sum_ne = self.sum_ne + half * sum(n * e for n, e in ahead)
        slope = max(0.0, (weight * sum_ne - sum_n * sum_e) / (weight * sum_nn - sum_n * sum_n))
        return max(0.0, (sum_e - slope * sum_n) / weight + slope * drafts)


class Worth:
    """Learns and decides. One thread."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def observe(self, requests: int, drafts: int, step_s: float) -> None:
        """A step that did nothing but decode."""
        seen = self._seen.setdefault(requests, _Seen())
        if drafts:
            seen.since += 1
            if seen.base_s:
                expected = 1.0 + seen.extra(drafts)
                seen.saw(drafts, min(step_s / seen.base_s, _OUTLIER * expected) - 1.0)
            return
        step_s = min(step_s, _OUTLIER * seen.base_s) if seen.count else step_s
        seen.count += 1
        seen.since = 0
        seen.base_s += max(_NEW, 1.0 / seen.count) * (step_s - seen.base_s)

    def choose(self, requests: int, chances: Sequence[float], costs: float = 0.0) -> int:
        """How many of the drafts to verify, of which `chances` are the greatest first. `costs`: seconds that one more
        draft takes to make."""
        seen = self._seen.get(requests)
        if seen is None or seen.count < LEAST_SEEN or not chances:
            return 0
        if seen.since >= PROBE_EVERY:
            return 0  # what a step takes without them is to be seen again
        best, chosen = MARGIN * requests / seen.base_s, 0
        for size in SIZES:
            if size > len(chances):
                break
            takes_s = seen.base_s * (1.0 + seen.extra(size)) + costs * size
            rate = (requests + sum(chances[:size])) / takes_s
            if rate > best:
                best, chosen = rate, size
        if chosen or seen.left_out < PROBE_EVERY:
            seen.left_out = 0 if chosen else seen.left_out + 1
            return chosen
        seen.left_out = 0
        return min(PROBE_ROWS, len(chances))

    def base_s(self, requests: int) -> float:
        """What a step without drafts takes; 0 where none was seen."""
        seen = self._seen.get(requests)
        return seen.base_s if seen is not None else 0.0
