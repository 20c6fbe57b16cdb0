"""The table of devices: published figures, each with its source."""

from __future__ import annotations

import pytest

from engine.capacity import PlanError, device_named, devices, measured_cpu
from engine.cpuspeed import measure_cpu
from tests.capacity.support import facts, plan

WANTED = {"a100-80", "h100", "h200", "b200", "gb200-nvl72", "l4", "l40s", "mi300x", "rtx-4090"}


def test_every_device_has_sensible_figures_and_a_source() -> None:
    assert {one.id for one in devices()} == WANTED
    for one in devices():
        assert one.source
        assert 20e9 <= one.hbm_bytes <= 300e9
        assert 10 < one.bf16_flops / one.hbm_bps < 1000, one.id
        assert one.fp8_flops == 0 or 1.9 < one.fp8_flops / one.bf16_flops < 2.1, one.id
        assert 1 <= one.node <= one.domain


@pytest.mark.parametrize(
    ("written", "meant"), [("H100", "h100"), ("GB200 NVL72", "gb200-nvl72"), ("A100", "a100-80"), ("4090", "rtx-4090")]
)
def test_a_device_is_known_however_it_is_written(written: str, meant: str) -> None:
    assert device_named(written).id == meant


def test_a_device_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(PlanError, match=r"device: 'mi300' is not known; did you mean mi300x\?.* rtx-4090 and cpu"):
        device_named("mi300")


def test_this_machine_is_measured_on_request() -> None:
    cpu = measure_cpu()
    assert (cpu.id, cpu.node, cpu.source) == ("cpu", 1, "measured now")
    assert 1e8 < cpu.hbm_bps < 1e12
    assert 1e9 < cpu.bf16_flops < 1e14
    with pytest.raises(PlanError, match="could not be measured"):
        measured_cpu(1, float("nan"), 1.0, 1.0)


def test_what_has_no_fp8_computes_it_in_bf16() -> None:
    fast, plain = (plan("llama-3-8b", device=name, weights_dtype="fp8") for name in ("h100", "a100-80"))
    assert round(fast.ridge) == round(1979 / 3.35)
    assert round(plain.ridge) == round(312 / 2.039)
    assert facts("llama-3-8b").weights == "bf16"
