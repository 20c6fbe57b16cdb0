"""How much prefill a step may carry beside requests that decode, from what steps took. No clock of its own.

A step that decodes and carries n tokens of prefill takes decode_s(batch) + n * token_s. The streams bear a step that is
`stretch` longer than without the prefill, so n = stretch * decode_s / token_s. token_s grows with the length of the
context before the tokens, so it is followed from step to step; and every REFRESH_EVERYth step goes without prefill, so
that decode_s is what decoding takes now, not what it took before the machine had other work.
"""

from __future__ import annotations

REFRESH_EVERY = 16
LEAST = 4  # tokens: the prompt must get on, however slow the machine
_WEIGHT = 0.25  # of the newest step


class Pace:
    """`first`: tokens while nothing is known; `most`: never more than these."""

    def __init__(self, first: int, most: int, stretch: float) -> None:
        self._first = first
        self._most = most
        self._stretch = stretch
        self._decode_s: dict[int, float] = {}  # by batch size
        self._token_s = 0.0
        self._mixed_steps = 0

    def tokens(self, decoding: int) -> int:
        """Tokens of prefill for the next step; none where decoding is to be measured again."""
        if not decoding:
            return self._most
        if self._stretch and self._mixed_steps >= REFRESH_EVERY:
            return 0
        decode_s = self._known(decoding)
        if not decode_s or not self._token_s:
            return min(self._first, self._most)
        return min(self._most, max(LEAST, int(self._stretch * decode_s / self._token_s)))

    def observe(self, decoding: int, prefill: int, step_s: float) -> None:
        """A step took `step_s` for `decoding` requests and `prefill` tokens."""
        if not prefill:
            self._mixed_steps = 0
            self._decode_s[decoding] = _follow(self._decode_s.get(decoding, 0.0), step_s)
            return
        self._mixed_steps += decoding > 0
        rest_s = step_s - (self._known(decoding) if decoding else 0.0)
        self._token_s = _follow(self._token_s, max(rest_s, 1e-7) / prefill)

    def _known(self, decoding: int) -> float:
        """The time of the batch size next to this one; 0 if none was ever seen."""
        if not self._decode_s:
            return 0.0
        return self._decode_s[min(self._decode_s, key=lambda size: abs(size - decoding))]


def _follow(before: float, value: float) -> float:
    return value if not before else before + _WEIGHT * (value - before)
