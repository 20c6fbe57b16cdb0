"""From logits to a token. Noise is a function of (seed, position, token), so a resumed stream equals an uninterrupted
one.

Gumbel-max: argmax over tokens of logit/temperature - log(-log(u)), u from SplitMix64 keyed by seed, position and
token id, is a draw from the softmax. Ties go to the lowest token id.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.backends.face import Logits
from engine.request import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
_GREEDY_BELOW = 1e-100  # no noise reaches across what this divides, and less would overflow

Ids = np.ndarray[Any, np.dtype[np.int64]]
Reals = np.ndarray[Any, np.dtype[np.float64]]
Allowed = np.ndarray[Any, np.dtype[np.bool_]]


def sample(logits: Logits, sampling: Sampling, position: int, allowed: Allowed | None = None) -> int:
    """The token at `position` (counted from the transcript's start). logits: fp32 [vocab]; allowed: bool [vocab]."""
    scores = logits.astype(np.float64)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    if sampling.temperature < _GREEDY_BELOW:
        return int(np.argmax(scores))
    ids = _kept(scores / sampling.temperature, sampling)
    noisy = scores[ids] / sampling.temperature + _gumbel(sampling.seed, position, ids)
    return int(ids[np.argmax(noisy)])


def _kept(scores: Reals, sampling: Sampling) -> Ids:
    """Token ids that top_k and top_p leave, in rising order. The most likely token is always left."""
    ids = np.flatnonzero(np.isfinite(scores))
    if 0 < sampling.top_k < len(ids):
        ids = _best(scores, ids, sampling.top_k)
    if sampling.top_p >= 1.0:
        return np.sort(ids)
    order = ids[np.lexsort((ids, -scores[ids]))]
    weights = np.exp(scores[order] - scores[order[0]])
    mass = np.cumsum(weights)
    count = int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1
    return np.sort(order[:count])


def _best(scores: Reals, ids: Ids, count: int) -> Ids:
    """The `count` best; at the edge, lower ids first."""
    edge = np.partition(scores[ids], len(ids) - count)[len(ids) - count]
    candidates = ids[scores[ids] >= edge]
    best: Ids = candidates[np.lexsort((candidates, -scores[candidates]))][:count]
    return best


def _gumbel(seed: int, position: int, ids: Ids) -> Reals:
    noise: Reals = -np.log(-np.log(uniform(seed, position, ids)))
    return noise


def uniform(seed: int, position: int, ids: Ids) -> Reals:
    """One number in (0, 1) per token id, from (seed, position, id) alone."""
    stream = _mix(_mix(seed & _MASK) ^ (position & _MASK))
    with np.errstate(over="ignore"):
        state = np.uint64(stream) + (ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's finaliser over one step of its counter (Steele, Lea and Flood 2014, figure 16)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
