"""The API bench on a small scale: its figures come from its evidence, and its sabotage is seen."""

from __future__ import annotations

import pytest
import tenuto

from bench import evidence
from bench.api import round_of
from bench.api_figures import figures, misses
from runtime.demo.stack import Stack
from runtime.store import Database

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.model]


@pytest.mark.parametrize(("sabotage", "lost"), [(None, False), ("lose", True)])
async def test_every_follower_is_given_every_event_once_and_one_that_skips_is_seen(
    stack: Stack, client: tenuto.AsyncClient, sabotage: str | None, lost: bool
) -> None:
    async with Database(stack.postgres_dsn) as db:
        lines = await round_of(stack, client, db, 1, 3, 40, sabotage)
    figure = figures(lines)
    assert figure["streams"] == 120
    assert figure["drops"]
    assert figure["events_given"] > 120 * 5
    assert bool(figure["events_lost"]) is lost
    assert (figure["events_repeated"], figure["streams_out_of_order"]) == (0, 0)
    assert any("none may be" in miss for miss in misses(figure)) is lost


async def test_evidence_that_was_altered_turns_the_figure_red(tmp_path) -> None:
    path = tmp_path / "api.jsonl"
    rounds = [
        {"kind": "round", "round": 1, "followed": followed, "tokens": 100, "seconds": seconds}
        for followed, seconds in ((False, 1.0), (True, 1.2))
    ]
    log = {"kind": "log", "round": 1, "session": "s", "ids": [1, 2]}
    seen = {"kind": "seen", "round": 1, "session": "s", "ids": [1, 2], "late_ms": 1.0, "slow": False, "drops": 1}
    evidence.leave(path, [*rounds, log, seen])
    assert misses(figures(*evidence.read(path))) == ["followed, the engine has 0.833 of its token rate; 0.9 is wanted"]
    evidence.alter(path, "round", "seconds", 0.5)
    assert "the evidence is not what was measured" in misses(figures(*evidence.read(path)))
