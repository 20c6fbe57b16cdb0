"""What a verification is worth: how many drafts a step takes, by what steps were seen to cost. No torch, no clock.

A step of B requests takes base(B) seconds and brings B tokens. With n drafts more it takes base(B) + extra(B, n) and
brings B + P, P being the sum of the chances that each draft stands with all before it. The n that brings the most
tokens a second is taken (Leviathan, Kalman and Matias 2023, section 3.3, for many requests at once), and none where
that is less than MARGIN better than none: so speculation is off by itself where it does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MARGIN = 1.02
MOST_ROWS = 64  # of drafts, in a step
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LEAST_SEEN = 2  # steps without drafts before the first with them
PROBE_EVERY = 64  # steps that drafts were left out of: one is tried with few of them, to see whether that still holds
PROBE_ROWS = 2
_FIRST_ROW = 0.06  # of the base, for each row, before anything is known
_NEW = 0.15  # weight of a new observation
_OUTLIER = 4.0  # times what was expected: the machine was busy with something else


@dataclass
class _Seen:
    """What steps of one number of requests took, in seconds."""

    base_s: float = 0.0
    count: int = 0
    since: int = 0  # steps with drafts since the last one without
    left_out: int = 0
    extra_s: dict[int, float] = field(default_factory=dict)  # by size


class Worth:
    """Learns and decides. One thread."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def observe(self, requests: int, drafts: int, step_s: float) -> None:
        """A step that did nothing but decode."""
        seen = self._seen.setdefault(requests, _Seen())
        if not drafts:
            if not seen.count or step_s < _OUTLIER * seen.base_s:
                seen.base_s = step_s if not seen.count else seen.base_s + _NEW * (step_s - seen.base_s)
            else:
                seen.base_s *= 1.1
            seen.count += 1
            seen.since = 0
            return
        seen.since += 1
        size = _size(drafts)
        extra = max(0.0, step_s - seen.base_s)
        known = self._extra(seen, size)
        if size not in seen.extra_s:
            seen.extra_s[size] = min(extra, _OUTLIER * known)
        else:
            seen.extra_s[size] += _NEW * (min(extra, _OUTLIER * known) - known)

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
            rate = (requests + sum(chances[:size])) / (seen.base_s + self._extra(seen, size) + costs * size)
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

    def _extra(self, seen: _Seen, size: int) -> float:
        """Seconds that so many rows more take: as seen, or in between, or beyond in proportion."""
        known = sorted(seen.extra_s.items())
        if not known:
            return _FIRST_ROW * seen.base_s * size
        below = [pair for pair in known if pair[0] <= size]
        above = [pair for pair in known if pair[0] >= size]
        if below and above:
            (low, low_s), (high, high_s) = below[-1], above[0]
            return low_s if low == high else low_s + (high_s - low_s) * (size - low) / (high - low)
        near, near_s = below[-1] if below else above[0]
        return near_s * size / near


def _size(drafts: int) -> int:
    return next((size for size in SIZES if size >= drafts), SIZES[-1])
