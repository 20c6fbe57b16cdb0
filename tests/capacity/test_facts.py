"""What is kept of a session, as properties that hold for every model."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.capacity import KvHeads, QueryHeads, attention_group, kv_bytes_per_token, session_bytes
from engine.capacity import formulas as f
from tests.capacity.support import NAMES, facts, plan

FEW = settings(max_examples=25, deadline=None)
names = st.sampled_from(NAMES)
tokens = st.integers(1, 200_000)
degrees = st.integers(1, 64)


def test_query_heads_cannot_be_taken_for_kv_heads() -> None:
    """Not the type, not a plain number, and nothing that counts bytes ever sees a query head."""
    wrong: Any = QueryHeads(64)
    with pytest.raises(TypeError, match="two things"):
        attention_group(QueryHeads(64), wrong, 128, 128)
    with pytest.raises(TypeError, match="two things"):
        attention_group(wrong, 8, 128, 128)  # type: ignore[arg-type]
    assert not hasattr(QueryHeads(64), "row_numbers")
    assert not hasattr(KvHeads(8), "pair_flops")
    for formula in (f.row_bytes, f.kv_bytes_per_token, f.session_bytes, f.shard_bytes, f.page_bytes):
        taken = {str(one.annotation) for one in inspect.signature(formula).parameters.values()}
        assert taken <= {"Group", "Iterable[Group]", "str", "int"}, formula


@FEW
@given(names, tokens, tokens)
def test_a_longer_session_keeps_no_less(name: str, one: int, other: int) -> None:
    groups = facts(name).groups
    assert session_bytes(groups, "bf16", min(one, other)) <= session_bytes(groups, "bf16", max(one, other))


@FEW
@given(names, tokens)
def test_fp8_halves_the_rows_and_leaves_states_as_they_are(name: str, n: int) -> None:
    groups = facts(name).groups
    states = sum(one.layers * one.state_bytes for one in groups)
    half, whole = (session_bytes(groups, dtype, n) - states for dtype in ("fp8", "bf16"))
    assert 2 * half == whole
    assert 2 * kv_bytes_per_token(groups, "fp8", n) == kv_bytes_per_token(groups, "bf16", n)


@FEW
@given(names, tokens, degrees)
def test_devices_hold_it_all_together_and_more_only_beyond_the_heads(name: str, n: int, degree: int) -> None:
    one = facts(name)
    whole = session_bytes(one.groups, "bf16", n)
    held = degree * f.shard_bytes(one.groups, "bf16", n, degree)
    assert held >= whole
    if all(group.shards % degree == 0 for group in one.groups):
        assert held - whole < degree
    kept = [group for group in one.groups if group.kind != "state"]
    for group in kept:
        if degree % group.shards == 0:
            assert f.on_one_device(group, degree) * degree == degree // group.shards


@FEW
@given(names, tokens, st.integers(1, 4096))
def test_a_window_keeps_no_more_than_its_tokens(name: str, n: int, more: int) -> None:
    for group in facts(name).groups:
        if group.kind == "windowed":
            full = session_bytes([group], "bf16", group.window)
            assert session_bytes([group], "bf16", group.window + more) == full


@FEW
@given(st.integers(1, 8192), st.integers(1, 8192))
def test_more_tokens_a_session_never_let_more_users_in(one: int, other: int) -> None:
    few, many = (plan("llama-3-8b", context=n).users_by_memory for n in sorted((one, other)))
    assert few >= many


def test_past_its_window_a_layer_counts_as_state() -> None:
    within, past = plan("mistral-7b-v0.1", context=4096), plan("mistral-7b-v0.1", context=4097)
    assert (within.kv_bytes_per_token, within.state_bytes_per_session) == (131_072, 0)
    assert (past.kv_bytes_per_token, past.state_bytes_per_session) == (0, 131_072 * 4096)
    assert within.kv_bytes_per_session == past.kv_bytes_per_session


def test_hybrids_keep_both_kinds() -> None:
    one = plan("qwen3-next-80b-a3b", context=8192)
    assert one.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert one.state_bytes_per_session == 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
    assert (
        plan("mamba-2.8b", context=10).kv_bytes_per_session == plan("mamba-2.8b", context=10_000).kv_bytes_per_session
    )


def test_a_mixture_bills_all_experts_and_reads_the_touched_ones() -> None:
    one = plan("mixtral-8x7b", tp=2)
    assert (one.weight_bytes, one.active_parameters) == (2 * 46_702_792_704, 12_879_925_248)
    assert facts("gpt-oss-120b").expert_weights == "mxfp4"
    assert plan("gpt-oss-120b").weight_bytes / 1e9 == pytest.approx(65.2, abs=0.1)
