"""From logits to a token. Noise is a function of (seed, position, token), so a resumed stream equals an uninterrupted
one.

Gumbel-max: argmax over tokens of logit/temperature - log(-log(u)), u from SplitMix64 keyed by seed, position and
token id, is a draw from the softmax. Ties go to the lowest token id.

Logarithms are computed for few tokens only. Those near the best logit are drawn from first; the winner's value says
how great the noise of any other would have to be, and noise so great shows in the integer that it is made from.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from engine.backends.face import Logits
from engine.errors import EngineFault
from engine.penalties import Tally, adjusted
from engine.sampling import Sampling

NOTHING_POSSIBLE = "no token has a finite logit; the model file or the engine's memory is damaged"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
GREEDY_BELOW = 1e-100  # no noise reaches across what this divides, and less would overflow
_SPREAD = 8.0  # of logit/temperature below the best; noise that reaches across it comes once in e^8 tokens
_FEW = 2048  # so many tokens are drawn from directly
_FIRST_SORTED = 1024

Ids = np.ndarray[Any, np.dtype[np.int64]]
Reals = np.ndarray[Any, np.dtype[np.float64]]
Words = np.ndarray[Any, np.dtype[np.uint64]]
Allowed = np.ndarray[Any, np.dtype[np.bool_]]


def sample(
    logits: Logits, sampling: Sampling, position: int, allowed: Allowed | None = None, tally: Tally | None = None
) -> int:
    """The token at `position` (counted from the transcript's start). logits: fp32 [vocab]; allowed: bool [vocab];
    tally: of the tokens before it, where `sampling` penalises.

    Raises EngineFault where no allowed token has a finite logit: the model or its pages are broken.
    """
    logits = adjusted(logits, sampling, tally)
    possible = _possible(logits, allowed)
    if sampling.temperature < GREEDY_BELOW:
        return int(np.argmax(np.where(possible, logits, -np.inf)))
    ids = _kept(logits, np.flatnonzero(possible), sampling)
    return _draw(logits, ids, sampling, position)


def distribution(
    logits: Logits, sampling: Sampling, allowed: Allowed | None = None, tally: Tally | None = None
) -> tuple[Ids, Reals]:
    """What `sample` draws from: token ids in rising order and their probabilities. Raises EngineFault as it does."""
    logits = adjusted(logits, sampling, tally)
    possible = _possible(logits, allowed)
    if sampling.temperature < GREEDY_BELOW:
        return np.array([np.argmax(np.where(possible, logits, -np.inf))]), np.ones(1)
    ids = _kept(logits, np.flatnonzero(possible), sampling)
    scores = logits[ids].astype(np.float64) / sampling.temperature
    weights = np.exp(scores - scores.max())
    return ids, weights / weights.sum()


def _possible(logits: Logits, allowed: Allowed | None) -> Allowed:
    possible = np.isfinite(logits)
    if allowed is not None:
        possible &= allowed
    if not possible.any():
        raise EngineFault(NOTHING_POSSIBLE)
    return possible


def _kept(logits: Logits, ids: Ids, sampling: Sampling) -> Ids:
    """Token ids that top_k, top_p and min_p leave, in rising order. The most likely token is always left."""
    if 0 < sampling.top_k < len(ids):
        ids = _best(logits, ids, sampling.top_k)
    if sampling.top_p < 1.0:
        ids = _nucleus(logits, ids, sampling)
    if sampling.min_p > 0.0:
        values = logits[ids].astype(np.float64)
        ids = ids[values >= values.max() + sampling.temperature * math.log(sampling.min_p)]
    return ids


def _nucleus(logits: Logits, ids: Ids, sampling: Sampling) -> Ids:
    """The likeliest that together reach top_p."""
    scores = logits[ids].astype(np.float64) / sampling.temperature
    weights = np.exp(scores - scores.max())
    wanted = sampling.top_p * float(weights.sum())
    count = _FIRST_SORTED
    while True:
        best = _best(logits, ids, count) if count < len(ids) else ids
        places = np.searchsorted(ids, best)
        order = np.lexsort((best, -logits[best]))
        mass = np.cumsum(weights[places][order])
        if mass[-1] >= wanted or len(best) == len(ids):
            inside = int(np.searchsorted(mass, wanted)) + 1
            return np.sort(best[order[:inside]])
        count *= 8


def _best(logits: Logits, ids: Ids, count: int) -> Ids:
    """The `count` best in rising order; at the edge, lower ids first."""
    values = logits[ids]
    edge = np.partition(values, len(ids) - count)[len(ids) - count]
    above, equal = ids[values > edge], ids[values == edge]
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))


def _draw(logits: Logits, ids: Ids, sampling: Sampling, position: int) -> int:
    """The token whose logit/temperature plus noise is greatest."""
    if len(ids) <= _FEW:
        return _greatest(logits, ids, sampling, position)[0]
    values = logits[ids]
    top = float(values.max())
    edge = top - _SPREAD * sampling.temperature
    near = ids[values >= edge]
    token, value = _greatest(logits, near, sampling, position)
    reaching = value - edge / sampling.temperature - 1e-6  # less than the noise that any other needs
    if not reaching >= 0.0:  # scores so great that the spread is lost in them
        return _greatest(logits, ids, sampling, position)[0]
    least = math.floor(math.exp(-math.exp(-reaching)) * 2.0**53) - 2
    words = _words(sampling.seed, position, len(logits))
    lucky = np.flatnonzero(words >= np.uint64(max(least, 0)))
    lucky = lucky[np.isin(lucky, ids, assume_unique=True)]
    if not len(lucky):
        return token
    return _greatest(logits, np.union1d(lucky, [token]), sampling, position)[0]


def _greatest(logits: Logits, ids: Ids, sampling: Sampling, position: int) -> tuple[int, float]:
    """The winner among these tokens, and its value."""
    noisy = logits[ids].astype(np.float64) / sampling.temperature + _gumbel(sampling.seed, position, ids)
    place = int(np.argmax(noisy))
    return int(ids[place]), float(noisy[place])


def _gumbel(seed: int, position: int, ids: Ids) -> Reals:
    noise: Reals = -np.log(-np.log(uniform(seed, position, ids)))
    return noise


def uniform(seed: int, position: int, ids: Ids) -> Reals:
    """One number in (0, 1) per token id, from (seed, position, id) alone."""
    words = _mixed(seed, position, (ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (words.astype(np.float64) + 0.5) * 2.0**-53


def _words(seed: int, position: int, vocab: int) -> Words:
    """53 bits for each token id: `uniform` times 2^53, less a half."""
    return _mixed(seed, position, _steps(vocab))


@lru_cache(maxsize=4)
def _steps(vocab: int) -> Words:
    return (np.arange(vocab, dtype=np.uint64) + np.uint64(1)) * _GOLDEN


def _mixed(seed: int, position: int, steps: Words) -> Words:
    stream = _mix(_mix(seed & _MASK) ^ (position & _MASK))
    with np.errstate(over="ignore"):
        state = np.uint64(stream) + steps
        state ^= state >> np.uint64(30)
        state *= np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(27)
        state *= np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    state >>= np.uint64(11)
    return state


def _mix(value: int) -> int:
    """SplitMix64's finaliser over one step of its counter (Steele, Lea and Flood 2014, figure 16)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
