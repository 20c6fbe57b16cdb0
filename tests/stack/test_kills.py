"""kill -9 of every part, in the middle of a think and of a tool, against an undisturbed run of the same seed."""

from __future__ import annotations

import random

import pytest
import pytest_asyncio
import tenuto

from runtime.demo import story
from runtime.demo.play import Kill, Played, play, random_kills
from runtime.demo.run import left_in_stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

PARTS = ("node", "engine", "worker", "api", "temporal", "postgres")
TOUCHES_TOOLS = ("node", "engine", "worker")  # the others are killed in a think
TOOL_S = (0.5, 2.0, 0.5)


def spec(seed: int) -> dict:
    return story.session(seed, 0.8, long_s=TOOL_S[1], short_s=TOOL_S[0])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def calm(stack) -> Played:
    async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
        return await play(stack, client, spec(11))


def assert_exact(played: Played, calm: Played) -> None:
    assert played.outputs == calm.outputs
    assert played.token_ids == calm.token_ids
    assert played.repeated == 0
    assert played.calls == calm.calls == story.ROUNDS
    assert played.event_ids == list(range(1, len(played.event_ids) + 1))


@pytest.mark.parametrize("part", PARTS)
async def test_a_think_goes_on_after_its_last_durable_token_whatever_died(stack, client, calm, part):
    played = await play(stack, client, spec(11), kills=[Kill("think", 2, 5, (part,))])
    assert [set(kill["pids"]) for kill in played.killed] == [{part}], played
    assert_exact(played, calm)


@pytest.mark.parametrize(
    "part", [part if part in TOUCHES_TOOLS else pytest.param(part, marks=pytest.mark.soak) for part in PARTS]
)
async def test_a_tool_runs_once_whatever_died(stack, client, calm, part):
    played = await play(stack, client, spec(11), kills=[Kill("tool", 2, 0.7, (part,))])
    assert [set(kill["pids"]) for kill in played.killed] == [{part}], played
    assert_exact(played, calm)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [21])
async def test_random_kills_of_node_and_engine_change_no_token(stack, client, seed):
    undisturbed = await play(stack, client, spec(seed))
    kills = random_kills(random.Random(seed), ("node", "engine"), tool_s=TOOL_S)
    assert_exact(await play(stack, client, spec(seed), kills=kills), undisturbed)


async def test_ended_sessions_hold_nothing_after_all_that(stack):
    assert await left_in_stack(stack) == []
