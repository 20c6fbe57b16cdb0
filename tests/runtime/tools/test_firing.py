"""A schedule that fires, at the node: one session, however often it is tried."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runtime.config import Wanted
from runtime.steps import firing
from runtime.store import agents, fleet, schedules, sessions
from tests.runtime.tools.conftest import Node
from workflows.contract import FiringIn
from workflows.states import Event as Move
from workflows.states import State

pytestmark = pytest.mark.model
TENANT = fleet.DEFAULT_TENANT
WHAT = FiringIn("sch_1", "scheduled/sch_1-2026-01-05T09:00:00Z")
SESSION = firing.session_of(WHAT.firing)


def plan(**changes: Any) -> schedules.Plan:
    message = {"content": "Go.", "tool_choice": "auto", "max_tool_rounds": 1}
    timing = {"cron": "@hourly", "every_s": None, "time_zone": "UTC", "jitter_s": 0, "overlap": "skip", "catchup_s": 60}
    made = schedules.Plan("", "a", None, message, {"by": "plan"}, timing, True)
    return dataclasses.replace(made, **changes)


@pytest.fixture
async def fires(node: Node) -> Node:
    content = agents.Content(Wanted(system="One.").model_dump(), b"1", "", {"team": "blue", "by": "agent"})
    await agents.create(node.db, TENANT, "a", "agv_1", content)
    await schedules.create(node.db, TENANT, "sch_1", plan(), paused=False)
    return node


async def state(node: Node) -> str:
    return str((await sessions.get(node.db, SESSION)).state)


async def at_rest(node: Node) -> None:
    """The session as its turn leaves it."""

    async def work(connection: Any) -> None:
        await connection.execute("UPDATE messages SET state = 'consumed' WHERE session_id = $1", SESSION)
        at = State(await connection.fetchval("SELECT state FROM sessions WHERE session_id = $1", SESSION))
        for move in (Move.PROVISION, Move.REST) if at is State.CREATED else (Move.REST,):
            at = await sessions.set_state(connection, SESSION, at, move)

    await node.db.run(work)


async def test_a_firing_that_is_tried_again_makes_nothing_twice_even_after_the_agent_has_changed(fires: Node) -> None:
    for _ in range(2):
        assert not (await firing.fire(fires.services, WHAT)).over
        await agents.revise(
            fires.db, TENANT, "a", "agv_2", agents.Content(Wanted(system="Two.").model_dump(), b"2", "", {})
        )
    row = await fires.db.fetchrow("SELECT * FROM sessions WHERE session_id = $1", SESSION)
    assert row is not None
    assert (row["config"]["system"], row["config"]["model"], row["agent_version"]) == ("One.", "m", 1)
    assert (row["schedule_id"], row["metadata"]) == ("sch_1", {"team": "blue", "by": "plan"})
    messages = await fires.db.fetch("SELECT content FROM messages WHERE session_id = $1", SESSION)
    assert [each["content"] for each in messages] == ["Go."]
    [run] = await schedules.runs(fires.db, "sch_1", 10, None)
    assert (run["session_id"], run["error"], run["state"]) == (SESSION, None, "created")


async def test_a_session_that_rests_is_completed_where_its_schedule_says_so(fires: Node) -> None:
    await firing.fire(fires.services, WHAT)
    assert not (await firing.look(fires.services, WHAT)).over  # its message waits
    await at_rest(fires)
    assert (await firing.look(fires.services, WHAT)).over
    row = await fires.db.fetchrow("SELECT ending FROM sessions WHERE session_id = $1", SESSION)
    assert row is not None
    assert row["ending"] == "completed"


async def test_a_session_is_left_at_rest_where_its_schedule_says_that(fires: Node) -> None:
    await schedules.change(fires.db, TENANT, "sch_1", plan(complete_when_idle=False), 1)
    await firing.fire(fires.services, WHAT)
    await at_rest(fires)
    assert (await firing.look(fires.services, WHAT)).over
    row = await fires.db.fetchrow("SELECT ending FROM sessions WHERE session_id = $1", SESSION)
    assert row is not None
    assert row["ending"] is None


async def test_a_run_whose_agent_is_archived_says_so_and_makes_no_session(fires: Node) -> None:
    await agents.archive(fires.db, TENANT, "a")
    assert (await firing.fire(fires.services, WHAT)).over
    [run] = await schedules.runs(fires.db, "sch_1", 10, None)
    assert (run["session_id"], run["error"]) == (None, "agent: a is archived; no new sessions are made of it")
    assert await fires.db.fetch("SELECT FROM sessions") == []


async def test_a_schedule_that_was_deleted_fires_no_more(fires: Node) -> None:
    await schedules.delete(fires.db, TENANT, "sch_1")
    assert (await firing.fire(fires.services, WHAT)).over
    assert await fires.db.fetch("SELECT FROM sessions") == []


async def test_a_run_that_gives_way_to_another_cancels_its_session(fires: Node) -> None:
    assert (await firing.cancel(fires.services, WHAT)).over  # before it was made: nothing to cancel
    await firing.fire(fires.services, WHAT)
    await schedules.delete(fires.db, TENANT, "sch_1")
    await firing.cancel(fires.services, WHAT)
    assert await state(fires) == "cancelling"


async def test_the_schedules_of_a_tenant_that_is_disabled_make_no_sessions(fires: Node) -> None:
    await fires.db.execute("UPDATE tenants SET disabled_at = now()")
    assert (await firing.fire(fires.services, WHAT)).over
    assert await fires.db.fetch("SELECT FROM sessions") == []
    [run] = await schedules.runs(fires.db, "sch_1", 10, None)
    assert (run["session_id"], run["error"]) == (None, f"the tenant {TENANT} is disabled; an operator can enable it")
