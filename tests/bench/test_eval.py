"""The eval in its short form on a real model, and its sabotage."""

from __future__ import annotations

import pytest

from bench import evidence
from bench.eval import SPOILERS, measure
from bench.eval_figures import figures, is_green, misses
from tests.bench.support import verified
from tests.engine.conftest import model_path, native_library

pytestmark = pytest.mark.model

FEW = {"tasks": 4, "questions": 4, "positions": 24}


@pytest.fixture(scope="module")
def model():
    native_library()
    return model_path("smollm2-135m-instruct")


def test_bf16_does_as_fp32_does_and_the_figures_can_be_recomputed(model, tmp_path):
    lines = measure(model, ("fp32", "bf16", "no_such_mode"), **FEW)
    figure = figures(lines)
    row = figure["modes"]["smollm2-135m-instruct/bf16"]
    assert row["tool"][1] == row["call"][1] == row["answer"][1] == 4
    assert row["positions"] == 24
    assert row["kl_mean"] < 0.01
    assert figure["modes"]["smollm2-135m-instruct/fp32"]["same_call"] == 1.0
    assert figure["absent"] == ["smollm2-135m-instruct/no_such_mode"]
    evidence.leave(tmp_path / "eval.jsonl", lines)
    assert verified(tmp_path)[1] == figure


@pytest.mark.parametrize("sabotage", ["disturbed", "coarse"])
def test_weights_that_were_spoilt_turn_it_red(model, sabotage):
    figure = figures(measure(model, ("fp32", "bf16"), spoil=SPOILERS[sabotage], **FEW))
    assert not is_green(figure)
    assert any("top1" in miss for miss in misses(figure))
    assert any("kl_mean" in miss for miss in misses(figure))
