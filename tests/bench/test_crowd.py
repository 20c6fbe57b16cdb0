"""The streams bench in its short form, and its sabotage: a broken promise must turn it red."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import crowd
from tests.engine.conftest import MODELS, model_path

pytestmark = pytest.mark.model


async def measured(sabotage: str | None, clients: int, seconds: float) -> list[dict[str, object]]:
    return await crowd.measure(model_path(MODELS[0]), clients, seconds, 11, sabotage)


@pytest.mark.soak
async def test_streams_that_come_and_go_at_random_leak_nothing_and_starve_nobody(tmp_path: Path) -> None:
    lines = await measured(None, 16, 8.0)
    figure = crowd.figures(lines)
    assert crowd.is_green(figure), figure
    assert figure["disconnects"] > 0
    evidence = [json.loads(json.dumps(line)) for line in lines]
    assert crowd.figures(evidence) == figure


@pytest.mark.parametrize(("sabotage", "red"), [("noise", "different"), ("leak", "pages_left")])
async def test_sabotage_turns_the_figure_red(sabotage: str, red: str) -> None:
    figure = crowd.figures(await measured(sabotage, 6, 1.0))
    assert not crowd.is_green(figure)
    assert figure[red] > 0


def test_a_request_that_many_overtook_is_found() -> None:
    asked = [{"sent_s": float(n), "first_s": 100.0 if n == 0 else 10.0 + n} for n in range(30)]
    assert crowd.most_overtaken(asked) == 29


def test_an_engine_that_stands_still_is_found() -> None:
    samples = [{"running": 1, "steps": 5}, {"running": 1, "steps": 5}, {"running": 1, "steps": 9}]
    assert crowd.standstills(samples) == 1
