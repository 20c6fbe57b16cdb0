"""Rotary position embeddings (Su et al., 2021): what angle every pair of values turns by, in one place for all
backends.

The pairs of a head of size d are (i, i + d/2): halves are rotated. Models that pair neighbours have their rows put in
this order when their weights are read.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.facts import PAGE_SIZE, ModelFacts, RopeScaling

Array = np.ndarray[Any, np.dtype[Any]]


def inverse_frequencies(facts: ModelFacts) -> Array:
    """float64 [rope_size/2]: a token at position p turns pair i by p times the i-th, in radians."""
    plain: Array = facts.rope_base ** (-np.arange(0, facts.rope_size, 2, dtype=np.float64) / facts.rope_size)
    scaling = facts.rope_scaling
    if scaling is None:
        return plain / facts.rope_scale
    return _llama3(plain, scaling) if scaling.kind == "llama3" else _yarn(plain, facts, scaling)


def rope_table(facts: ModelFacts) -> tuple[Array, Array]:
    """cos and sin, each [context rounded up to a page, rope_size/2], computed in float64 and kept in fp32."""
    positions = np.arange(-(-facts.context // PAGE_SIZE) * PAGE_SIZE, dtype=np.float64)
    angles = positions[:, None] * inverse_frequencies(facts)[None, :]
    scale = facts.rope_scaling.table_scale if facts.rope_scaling else 1.0
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


def attention_scale(facts: ModelFacts) -> float:
    """What a product of a query and a key is multiplied by before the softmax."""
    size = facts.head_size if facts.mla is None else facts.mla.nope_size + facts.mla.rope_size
    return (facts.rope_scaling.score_scale if facts.rope_scaling else 1.0) / math.sqrt(size)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """By how much scores grow for a context that is `factor` times as long (Peng et al., 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(plain: Array, scaling: RopeScaling) -> Array:
    """Long waves are stretched, short ones stay, those between are mixed (Llama 3.1's reference code)."""
    turns = scaling.original_context * plain / (2 * math.pi)  # in the original context
    share = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    mixed: Array = (1 - share) * plain / scaling.factor + share * plain
    return mixed


def _yarn(plain: Array, facts: ModelFacts, scaling: RopeScaling) -> Array:
    """Pairs that turn often in the original context stay, those that turn seldom are stretched (section 3.2)."""
    size, base = facts.rope_size, facts.rope_base

    def pair_of(turns: float) -> float:
        return size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_of(scaling.high), pair_of(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    ramp = np.clip((np.arange(size // 2, dtype=np.float64) - first) / max(last - first, 0.001), 0.0, 1.0)
    mixed: Array = plain / scaling.factor * ramp + plain * (1 - ramp)
    return mixed
