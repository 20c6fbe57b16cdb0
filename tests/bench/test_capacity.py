"""The capacity bench in its short form, and its sabotage: a plan that is wrong must turn it red."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from bench import capacity, capacity_figures, evidence
from engine.capacity import model_facts
from tests.engine.conftest import MODELS, model_path

GREEN: dict[str, Any] = {
    "sealed": True,
    "foreign_cores": 0.0,
    "pages": 2,
    "pages_wrong": 0,
    "prefill_ratio": 1.1,
    "decode_ratio": 1.0,
    "batch_ratio": 1.5,
    "planned_of_slo": 1.0,
    "above_of_slo": 3.0,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"sealed": False}, "altered"),
        ({"foreign_cores": 1.4}, "no measure"),
        ({"pages_wrong": 1}, "other bytes than planned"),
        ({"pages": 0}, "other bytes than planned"),
        ({"decode_ratio": 8.0}, "decode took 8.0 times"),
        ({"prefill_ratio": 0.1}, "prefill took 0.1 times"),
        ({"planned_of_slo": 2.0}, "the planned maximum took 2.0"),
        ({"above_of_slo": 1.1}, "too careful"),
    ],
)
def test_every_bar_is_told_when_it_is_missed(change: dict[str, Any], said: str | None) -> None:
    found = capacity_figures.misses(GREEN | change)
    assert capacity_figures.is_green(GREEN | change) == (said is None)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.model
def test_query_heads_for_kv_heads_are_found(tmp_path: Path) -> None:
    path = model_path(MODELS[0])
    facts = model_facts(str(path), tmp_path, io.BytesIO())
    for sabotage, wrong in ((None, 0), ("heads", 1)):
        lines = capacity.pages(capacity.Wanted(path, sabotage=sabotage), facts, ["bf16"])
        assert sum(one["predicted_bytes"] != one["allocated_bytes"] for one in lines) == wrong


@pytest.mark.soak
@pytest.mark.model
async def test_what_is_planned_is_what_is_measured(tmp_path: Path) -> None:
    evidence.leave(
        tmp_path / "capacity.jsonl", await capacity.measure(capacity.Wanted(model_path(MODELS[0]), quick=True))
    )
    figure = capacity_figures.figures(*evidence.read(tmp_path / "capacity.jsonl"))
    assert not figure["pages_wrong"]
    assert figure["planned_of_slo"] < figure["above_of_slo"]


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize(("sabotage", "red"), [("band", "decode"), ("knobs", "the planned maximum")])
async def test_sabotage_turns_the_figure_red(tmp_path: Path, sabotage: str, red: str) -> None:
    wanted = capacity.Wanted(model_path(MODELS[0]), rounds=2, quick=True, sabotage=sabotage)
    figure = capacity_figures.figures(await capacity.measure(wanted), True)
    assert any(one.startswith(red) for one in capacity_figures.misses(figure))
