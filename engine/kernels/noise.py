"""The noise of `engine.sampler` on the device: a function of seed, position and token, bit for bit as there up to the
logarithms.

SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, figure 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mixed(state):
    state = (state ^ (state >> 30)) * _FIRST
    state = (state ^ (state >> 27)) * _SECOND
    return state ^ (state >> 31)


@triton.jit
def stream_of(seed, position):
    """The stream of a position: int64 seed and position to uint64."""
    return _mixed((_mixed(seed.to(tl.uint64) + _GOLDEN) ^ position.to(tl.uint64)) + _GOLDEN)


@triton.jit
def gumbel(stream, token):
    """Gumbel noise of these token ids, float64; never infinite, as the uniform is in (0, 1)."""
    word = _mixed(stream + (token.to(tl.uint64) + 1) * _GOLDEN) >> 11
    uniform = (word.to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2 ** -53
    return -tl.log(-tl.log(uniform))
