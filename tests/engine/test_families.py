"""What a Hugging Face config is taken to say, and what it may not say."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ModelFileError
from engine.facts import Mla
from engine.families import facts_of
from engine.rope import yarn_magnitude

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 288,
}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def read(family: str, **changes: Any) -> Any:
    return facts_of({"model_type": family, **SIZES, **changes}, size_bytes=1)


def test_a_mistral_that_says_nothing_of_it_has_a_window_of_4096() -> None:
    assert read("mistral", max_position_embeddings=8192).windows == (4096,) * 3
    assert read("mistral").windows == ()  # the context is shorter
    assert read("mistral", sliding_window=None, max_position_embeddings=8192).windows == ()


def test_a_qwen_has_windows_where_it_uses_them_and_from_the_layer_on_that_it_names() -> None:
    assert read("qwen2", sliding_window=24, max_window_layers=1).windows == ()
    assert read("qwen2", sliding_window=24, max_window_layers=1, use_sliding_window=True).windows == (0, 24, 24)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read("qwen3", sliding_window=24, use_sliding_window=True, layer_types=kinds).windows == (24, 0, 24)


def test_heads_need_not_add_up_to_the_hidden_size() -> None:
    assert read("qwen3").query_width == 4 * 128
    assert read("mistral", head_dim=32).query_width == 128
    assert read("llama").query_width == 64


def test_rope_is_found_under_its_old_names_and_its_new_one() -> None:
    old = read("llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = read("llama", rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0})
    assert (old.rope_base, old.rope_scale) == (new.rope_base, new.rope_scale) == (5e5, 2.0)


def test_yarn_lengthens_the_context_unless_it_has_its_length_already() -> None:
    assert read("qwen2", rope_scaling=YARN).context == 2048
    assert read("qwen2", rope_scaling=YARN, max_position_embeddings=4096).context == 4096
    assert read("qwen2", rope_scaling=YARN).rope_scaling.table_scale == yarn_magnitude(4.0)


def test_a_latent_row_is_the_one_head_of_keys() -> None:
    facts = read("deepseek_v2", **LATENT, first_k_dense_replace=3)
    assert facts.mla == Mla(q_rank=None, kv_rank=32, rope_size=16, nope_size=32, value_size=24)
    assert (facts.heads, facts.kv_heads, facts.head_size) == (4, 1, 48)


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("gemma", {}, "it holds a 'gemma' model; llama, qwen2, qwen3, mistral, deepseek_v2, deepseek_v3 are supported"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantised .'awq'."),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("llama", {"attention_bias": True}, "biases in its output"),
        ("llama", {"mlp_bias": True}, "biases in its output or feed-forward"),
        ("llama", {"hidden_size": 0}, "hidden_size is 0; 1 to"),
        ("llama", {"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ("llama", {"vocab_size": 1 << 30}, "vocab_size is"),
        ("llama", {"num_key_value_heads": 3}, "4 heads of 16 and 3 kv heads do not make a model"),
        ("llama", {"head_dim": 15}, "do not make a model"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1; a positive number"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope by 'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor is inf"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "some layers in another way"),
        ("llama", {"partial_rotary_factor": 0.5}, "only a part of each head"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["x"] * 3}, "layer_types"),
        ("mistral", {"sliding_window": -1}, "sliding_window is -1"),
        ("deepseek_v3", LATENT | {"first_k_dense_replace": 1}, "layers from 1 on are mixtures of experts"),
        ("deepseek_v2", LATENT, "layers from 0 on are mixtures of experts"),
    ],
)
def test_what_is_not_supported_is_a_sentence(family: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelFileError, match=told):
        read(family, **changes)
