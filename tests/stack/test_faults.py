"""The faults bench in its short form, and its sabotage: a broken promise must turn it red."""

from __future__ import annotations

import pytest
import pytest_asyncio

from bench import evidence, faults
from bench.faults_bed import Bed
from bench.faults_figures import PROMISES, figures, misses
from bench.faults_plan import Fault
from tests.bench.support import verified

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

LASTLY = Fault("kill", "api", "idle", 1, 0.0, 0.0, 0.0)


def wanted(kills: int, sabotage: str | None = None) -> faults.Wanted:
    return faults.Wanted(kills, seed=7, sessions=1, each=kills, seeds=1, sabotage=sabotage, patience_s=0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bed(stack) -> Bed:
    return Bed(stack, {}, {}, None)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def calm(bed) -> list[evidence.Line]:
    return await faults.undisturbed(bed, wanted(0))


async def test_a_session_whose_engine_sandbox_and_node_break_keeps_every_promise(bed, calm, tmp_path):
    plan = [
        Fault("kill", "engine", "think", 1, 5.0, 0.0, 0.0),
        Fault("kill", "sandbox", "tool", 2, 0.5, 0.0, 0.0),
        Fault("kill", "node", "restore", 3, 0.02, 0.0, 0.0),
    ]
    lines = await faults.disturbed(bed, wanted(3), calm, plan)
    figure = figures(lines)
    assert misses(figure) == []
    assert figure["by_kind"].keys() == {"kill engine", "kill sandbox", "kill node"}
    assert figure["outcome_unknown"] == 1
    evidence.leave(tmp_path / "faults.jsonl", lines)
    assert verified(tmp_path) == (0, figure)


@pytest.mark.parametrize(
    ("kills", "sabotage", "red"),
    [
        pytest.param(1, "rerun-tool", "repeated", marks=pytest.mark.soak),
        (1, "skip-fence", "diverged"),
        (0, "leak-process", "leaked"),
    ],
)
async def test_sabotage_turns_the_figure_red(bed, calm, kills, sabotage, red):
    figure = figures(await faults.disturbed(bed, wanted(kills, sabotage), calm, [LASTLY]))
    assert {name for name in PROMISES if figure[name]} >= {red}
