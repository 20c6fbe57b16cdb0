"""What is wrong is said in a sentence that names the key and what is legal. Nothing is guessed silently."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.capacity import PlanError, Wish, make_plan, parse_config, read_config
from tests.capacity.support import NAMES, config, facts, plan

MISSING = [
    ("llama-3-70b", "hidden_size"),
    ("llama-3-70b", "num_hidden_layers"),
    ("llama-3-70b", "num_attention_heads"),
    ("llama-3-70b", "vocab_size"),
    ("llama-3-70b", "max_position_embeddings"),
    ("deepseek-v3", "kv_lora_rank"),
    ("mixtral-8x7b", "num_local_experts"),
    ("qwen3-next-80b-a3b", "linear_num_value_heads"),
    ("jamba-v0.1", "attn_layer_period"),
]
CONTRADICTIONS = [
    ("llama-3-70b", {"num_key_value_heads": 7}, "num_attention_heads", "cannot be divided by num_key_value_heads 7"),
    ("llama-3-70b", {"hidden_size": 8191}, "hidden_size", "cannot be divided by num_attention_heads 64"),
    ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok", "more than the 8"),
    ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types", "for each of 24 layers"),
    ("gemma-3-1b", {"layer_types": ["x"] * 26}, "layer_types", "'x' is none of"),
    ("jamba-v0.1", {"attn_layer_offset": 8}, "attn_layer_offset", "not below attn_layer_period 8"),
    ("mamba-codestral-7b", {"num_heads": 100}, "num_heads", "not expand 2 times hidden_size 4096"),
    ("llama-3-70b", {"model_type": "rwkv"}, "model_type", "known are deepseek_v2"),
    ("llama-3-70b", {"torch_dtype": "float3"}, "torch_dtype", "there are fp32"),
    ("llama-3-70b", {"quantization_config": {"quant_method": "magic"}}, "quantization_config", "--weights-dtype"),
    ("llama-3-70b", {"num_hidden_layers": -1}, "num_hidden_layers", "from 1 to 1024"),
    ("llama-3-70b", {"num_hidden_layers": math.nan}, "num_hidden_layers", "nan is not a whole number"),
    ("llama-3-70b", {"num_hidden_layers": True}, "num_hidden_layers", "True is not"),
    ("llama-3-70b", {"num_hidden_layers": 10**5000}, "num_hidden_layers", "more than 256 bits"),
    ("llama-3-70b", {"tie_word_embeddings": "no"}, "tie_word_embeddings", "neither true nor false"),
]


@pytest.mark.parametrize(("name", "key"), MISSING)
def test_a_key_that_is_missing_is_named(name: str, key: str) -> None:
    given_ = config(name)
    del given_[key]
    with pytest.raises(PlanError, match="the config does not have it") as error:
        read_config(given_)
    assert error.value.key == key


@pytest.mark.parametrize(("name", "changes", "key", "said"), CONTRADICTIONS)
def test_keys_that_contradict_one_another_are_named(name: str, changes: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        facts(name, **changes)
    assert error.value.key == key
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("wish", "key", "said"),
    [
        ({"tp": 3}, "tp", "3 does not divide num_attention_heads 64; legal are 1, 2, 4, 8, 16, 32, 64"),
        ({"tp": 0}, "tp", "from 1 to 512"),
        ({"tp": 2.5}, "tp", "whole number"),
        ({"context": 9000}, "context", "8192 tokens that llama-3-70b was made for"),
        ({"util": 0}, "util", "from 0.001 to 1"),
        ({"util": math.nan}, "util", "nan is not"),
        ({"util": 10**400}, "util", "a huge number"),
        ({"mfu": -0.5}, "mfu", "from 0.001"),
        ({"headroom": 1.0}, "headroom", "0.95"),
        ({"users": -5}, "users", "from 1"),
        ({"requests_per_second": math.inf}, "requests_per_second", "inf is not"),
        ({"slo_tpot_s": 50}, "slo_tpot_s", "50 ms are 0.05"),
        ({"slo_tpot_s": 0.001, "tp": 8}, "slo_tpot_s", "one sequence alone takes 5.3"),
        ({"slo_ttft_s": 0.01, "tp": 8}, "slo_ttft_s", "7936 tokens of prompt take 0.3053 s"),
        ({"output_tokens": 8192}, "output_tokens", "leave nothing of a context"),
        ({"prompt_tokens": 9000}, "prompt_tokens", "more than the context of 8192"),
        ({"kv_dtype": "fp3"}, "kv_dtype", "there are fp32, bf16, fp16, fp8, int8"),
        ({"device": "h10"}, "device", "did you mean h100"),
        ({"dp_attention": True}, "dp_attention", "has no experts"),
    ],
)
def test_a_wish_that_cannot_be_is_named(wish: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        plan("llama-3-70b", **wish)
    assert error.value.key == key
    assert said in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '"x"', "nul", "[" * 100_000, '{"a":' * 100_000, "{}" + " " * (1 << 20), b"\xff\xfe"]
)
def test_what_is_no_config_is_refused(text: str | bytes) -> None:
    with pytest.raises(PlanError, match=r"config\.json: it "):
        parse_config(text)


def test_what_was_assumed_is_listed() -> None:
    bare = {key: value for key, value in config("llama-3-8b").items() if key != "torch_dtype"}
    bare.pop("num_key_value_heads")
    found = make_plan(read_config(bare), Wish()).plan.assumed
    assert any("num_key_value_heads 32" in one for one in found)
    assert any("bf16" in one for one in found)
    assert "util 0.9" in found
    told = plan("llama-3-8b", context=512, util=0.8, mfu=0.4).assumed
    assert not any(one.startswith(("context", "util", "mfu")) for one in told)


odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_whatever_stands_in_a_config_there_is_a_plan_or_a_sentence(name: str, data: st.DataObject) -> None:
    broken = copy.deepcopy(config(name))
    for key in data.draw(st.lists(st.sampled_from(sorted(broken)), min_size=1, max_size=3)):
        broken[key] = data.draw(odd)
    with contextlib.suppress(PlanError):
        made = make_plan(read_config(broken), Wish()).plan
        json.dumps(made.as_json(), allow_nan=False)


def test_experts_are_spread_over_as_many_devices_as_there_are_experts_and_no_more():
    one = plan("deepseek-v3", device="gb200-nvl72", tp=144, dp_attention=True)
    assert one.fits
    assert {72, 144, 256} <= set(one.legal_tp)
    assert any("links between machines" in words for words in one.assumed)
    assert not any("links" in words for words in plan("deepseek-v3", tp=8).assumed)
    with pytest.raises(PlanError, match="256 experts are fewer than 320 devices"):
        plan("deepseek-v3", tp=320, dp_attention=True)
