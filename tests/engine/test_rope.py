"""Angles of rotary positions, against those of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.facts import Mla, RopeScaling
from engine.rope import attention_scale, inverse_frequencies, rope_table, yarn_magnitude
from tests.engine.conftest import Loaded

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}


def theirs(kind: str, size: int, base: float, **parameters: Any) -> tuple[Any, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters |= {"rope_type": kind, "rope_theta": base}
    config = LlamaConfig(
        head_dim=size,
        hidden_size=size,
        num_attention_heads=1,
        max_position_embeddings=163_840,
        rope_parameters=parameters,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return frequencies.numpy(), scale


@pytest.mark.parametrize(("size", "base"), [(64, 500_000.0), (128, 500_000.0), (64, 10_000.0)])
def test_llama3s_frequencies_are_those_of_transformers(tiny: Loaded, size: int, base: float) -> None:
    scaling = RopeScaling("llama3", factor=8.0, original_context=8192, low=1.0, high=4.0)
    facts = replace(tiny.facts, head_size=size, rope_base=base, rope_scaling=scaling)
    wanted, _ = theirs("llama3", size, base, **LLAMA3)
    np.testing.assert_allclose(inverse_frequencies(facts), wanted, rtol=2e-6)


@pytest.mark.parametrize(("size", "truncate"), [(64, True), (128, True), (64, False)])
def test_yarns_frequencies_and_scale_are_those_of_transformers(tiny: Loaded, size: int, truncate: bool) -> None:
    scale = yarn_magnitude(40.0)
    scaling = RopeScaling("yarn", 40.0, 4096, low=1.0, high=32.0, table_scale=scale, truncate=truncate)
    facts = replace(tiny.facts, head_size=size, rope_base=10_000.0, rope_scaling=scaling)
    wanted, wanted_scale = theirs("yarn", size, 10_000.0, **YARN, truncate=truncate)
    np.testing.assert_allclose(inverse_frequencies(facts), wanted, rtol=2e-6)
    assert scale == pytest.approx(wanted_scale)
    assert rope_table(facts)[0][0, 0] == np.float32(scale)  # the cosine of nothing


def test_linear_scaling_stretches_every_wave_alike(tiny: Loaded) -> None:
    plain, scaled = tiny.facts, replace(tiny.facts, rope_scale=4.0)
    assert np.array_equal(inverse_frequencies(scaled) * 4, inverse_frequencies(plain))
    assert np.array_equal(rope_table(scaled)[1][32], rope_table(plain)[1][8])


def test_latent_attention_turns_the_rotated_part_alone_and_scales_by_a_whole_head(tiny: Loaded) -> None:
    mla = Mla(q_rank=None, kv_rank=512, rope_size=64, nope_size=128, value_size=128)
    scaling = RopeScaling("yarn", 40.0, 4096, low=1.0, high=32.0, score_scale=yarn_magnitude(40.0) ** 2)
    facts = replace(tiny.facts, head_size=576, kv_heads=1, mla=mla, rope_scaling=scaling)
    assert inverse_frequencies(facts).shape == (32,)
    assert attention_scale(facts) == pytest.approx(192**-0.5 * (0.1 * np.log(40.0) + 1) ** 2)
    assert facts.kv_bytes_per_token("bf16") == facts.layers * 576 * 2
