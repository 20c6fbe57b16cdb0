"""The steps bench in its short form: no bar is held to, since the machine is not quiet."""

from __future__ import annotations

import pytest

from bench import evidence, steps
from bench.steps_figures import figures
from tests.bench.support import verified
from tests.conftest import TEST_MODEL

pytestmark = [pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]


async def test_steps_are_taken_apart_and_parked_sessions_all_wake(model_path, tmp_path):
    lines = await steps.measure(TEST_MODEL, rounds=1, count=4)
    figure = figures(lines)
    assert figure["overhead_ms"].keys() == {"take_input", "think", "run_tools"}
    assert figure["overhead_ratio"] > 0
    for step, parts in figure["breakdown_ms"].items():
        assert parts.keys() >= {"temporal dispatch", "activity", "temporal hop", "begin tx", "complete tx", step}
        assert parts["activity"] >= parts["begin tx"] + parts["complete tx"]
    assert figure["breakdown_ms"]["run_tools"]["tool"] > 0
    assert (figure["parked"], figure["woken"]) == (4, 4)
    assert figure["wake_token_p50_ms"] >= figure["wake_p50_ms"] > 0
    evidence.leave(tmp_path / "steps.jsonl", lines)
    assert verified(tmp_path)[1] == figure
    evidence.alter(tmp_path / "steps.jsonl", "step", "inside_s", 0.1)
    assert verified(tmp_path)[0] == 1
