"""The chaos gate in short: it is green as it is, and red where something is left behind."""

from __future__ import annotations

import os

import pytest

from bench.sandbox_chaos import SABOTAGES, Wanted, figures, measure, misses
from bench.sandbox_chaos_play import FATES, fate_of
from sandbox import bubblewrap

pytestmark = pytest.mark.sandbox


@pytest.fixture(autouse=True)
def _possible() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start an engine of its own")
    if (reason := bubblewrap.why_not()) is not None:
        pytest.skip(reason)


async def test_ten_sandboxes_killed_in_every_way_leave_nothing() -> None:
    wanted = Wanted(10)
    assert misses(figures(wanted, await measure(wanted))) == []


@pytest.mark.parametrize(
    "sabotage", [SABOTAGES[0], *(pytest.param(each, marks=pytest.mark.soak) for each in SABOTAGES[1:])]
)
async def test_what_is_left_behind_turns_it_red(sabotage: str) -> None:
    wanted = Wanted(5, ("bubblewrap",), sabotage=sabotage)
    kind = {"skip-reap": "records", "leak-process": "processes", "leak-uid": "uids"}[sabotage]
    assert any(kind in miss for miss in misses(figures(wanted, await measure(wanted))))


def test_every_fate_comes_in_every_round_and_the_seed_decides_when() -> None:
    plans = [[fate_of(seed, number) for number in range(50)] for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    for at in range(0, 50, len(FATES)):
        assert set(plans[0][at : at + len(FATES)]) == set(FATES)
