"""Which format helps which bottleneck."""

from __future__ import annotations

import pytest

from engine.doctor.kinds import kv_dtype, prefill_dtype, weights_dtype
from engine.scheduler import Budget
from tests.doctor.stage import Stage, owed


def crowded(prompt: int = 60, tokens: int = 40) -> Stage:
    """Requests wait, and not for pages."""
    stage = Stage(512, budget=Budget(running=2))
    stage.crowd(10, prompt, tokens)
    stage.run()
    return stage


def test_a_load_for_which_nobody_waits_gets_no_advice_and_is_told_what_binds():
    stage = Stage(512)
    stage.crowd(2, 60, 40)
    stage.run()
    report = stage.report("precision", bill=owed(weights_bytes=10**9))
    assert not report.findings
    assert "weights bind" in report.notes[0]
    assert "nobody waits" in report.notes[1]


def test_where_a_step_reads_weights_these_are_to_be_smaller():
    finding = crowded().findings("precision", bill=owed(weights_bytes=10**9))["precision.weights"]
    assert finding.remedies[0].set == "TENUTO_ENGINE_DTYPE=w4a8"
    assert "bench.eval" in finding.remedies[0].cost
    assert finding.evidence["speedup"] == pytest.approx(2.0, rel=0.01)


def test_where_a_step_reads_kv_that_is_to_be_smaller():
    finding = crowded().findings("precision", bill=owed("fp32", weights_bytes=1000))["precision.kv"]
    assert finding.remedies[0].set == "TENUTO_ENGINE_DTYPE=bf16"
    assert finding.evidence["kv_read_bytes"] > 1000


def test_where_requests_wait_for_pages_the_kv_is_to_be_smaller():
    stage = Stage(24)
    stage.crowd(10, 100, 60)
    stage.run()
    finding = stage.findings("precision", bill=owed("fp32", weights_bytes=10**9))["precision.kv"]
    assert finding.remedies[0].gain == 2.0
    assert not stage.findings("precision", bill=owed("bf16"))  # on a cpu there is nothing smaller


def test_where_prompts_have_the_time_products_bind():
    stage = Stage(512, budget=Budget(running=2, prefill_alone=64))
    stage.timed.token_s = 0.001
    stage.crowd(10, 600, 2)
    stage.run()
    finding = stage.findings("precision", bill=owed(weights_bytes=10**9))["precision.prefill"]
    assert finding.evidence["prefill_share"] > 0.5
    assert finding.remedies[0].set == "TENUTO_ENGINE_DTYPE=w4a8"


def test_what_is_small_already_has_nothing_below_it():
    assert weights_dtype("w4a8", "cpu") is None
    assert weights_dtype("w4a16+e4m3kv", "triton") is None
    assert kv_dtype("bf16+e4m3kv", "triton") is None
    assert kv_dtype("bf16", "cpu") is None
    assert prefill_dtype("w8a8", "triton") is None
    assert weights_dtype("bf16", "torch") is None


def test_on_a_gpu_each_bottleneck_has_its_format():
    settings = [choice("bf16", "triton").setting for choice in (weights_dtype, kv_dtype, prefill_dtype)]
    assert settings == ["TENUTO_ENGINE_DTYPE=w4a16", "TENUTO_KV_DTYPE=e4m3", "TENUTO_ENGINE_DTYPE=w8a8"]
