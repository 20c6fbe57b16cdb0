"""Schedules at the API: the row is the truth, and Temporal has what it says."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from temporalio.client import Client, ScheduleActionStartWorkflow, ScheduleDescription, ScheduleOverlapPolicy
from temporalio.service import RPCError

from runtime import schedules
from runtime.store import Database

PLAN: dict[str, Any] = {"agent": "reviewer", "message": "Review.", "cron": "0 9 * * mon-fri", "time_zone": "UTC"}


@pytest.fixture(autouse=True)
async def _agent(client: httpx.AsyncClient) -> None:
    made = await client.post("/v1/agents", json={"name": "reviewer", "tools": ["bash"], "metadata": {"team": "blue"}})
    assert made.status_code == 201


async def made(client: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    answer = await client.post("/v1/schedules", json={**PLAN, **changes})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def applied(app: FastAPI, schedule_id: str) -> ScheduleDescription:
    """As Temporal has it, once it was told all that the row says."""
    db: Database = app.state.db
    temporal: Client = app.state.temporal
    await asyncio.gather(*app.state.sending)  # somebody else may be telling it
    for waiting in await schedules.store.to_apply(db):
        await schedules.apply(temporal, db, waiting)
    return await temporal.get_schedule_handle(schedules.PREFIX + schedule_id).describe()


async def test_temporal_has_what_the_row_says_and_again_where_it_lost_it(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    plan = await made(client, overlap="cancel_other", jitter_s=5, catchup_s=90, paused=True)
    about = (await applied(app, plan["id"])).schedule
    assert isinstance(about.action, ScheduleActionStartWorkflow)
    assert (about.action.workflow, about.state.paused) == ("ScheduledRun", True)
    assert (about.policy.overlap, about.policy.catchup_window) == (
        ScheduleOverlapPolicy.CANCEL_OTHER,
        timedelta(seconds=90),
    )
    assert (about.spec.jitter, about.spec.time_zone_name) == (timedelta(seconds=5), "UTC")
    at = f"/v1/schedules/{plan['id']}"
    changed = (await client.patch(at, json={"every_s": 3600, "agent": "reviewer@1"})).json()
    assert (changed["cron"], changed["every_s"], changed["agent"]) == (None, 3600, "reviewer@1")
    await client.post(f"{at}/unpause")
    about = (await applied(app, plan["id"])).schedule
    assert (about.state.paused, about.spec.intervals[0].every) == (False, timedelta(hours=1))
    assert len((await client.get(at)).json()["next_runs"]) == 5
    temporal: Client = app.state.temporal
    handle = temporal.get_schedule_handle(schedules.PREFIX + plan["id"])
    await handle.delete()
    await schedules.compare(temporal, app.state.db)
    assert (await handle.describe()).schedule.spec.intervals[0].every == timedelta(hours=1)
    assert (await client.delete(at)).json()["deleted"]
    with pytest.raises(RPCError, match="not found"):
        await applied(app, plan["id"])
    for method, path in (("GET", ""), ("PATCH", ""), ("POST", "/pause"), ("POST", "/trigger"), ("GET", "/runs")):
        body = {"json": {"jitter_s": 1}} if method == "PATCH" else {}
        assert (await client.request(method, at + path, **body)).status_code == 404


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"cron": "99 * * * *"}, "cron"),
        ({"cron": None}, None),
        ({"every_s": 60}, None),
        ({"time_zone": "Nowhere/City"}, "time_zone"),
        ({"agent": "nobody"}, "agent"),
        ({"agent": "reviewer@2"}, "agent"),
        ({"tool_choice": "hammer"}, "tool_choice"),
        ({"message": ""}, "message"),
        ({"overlap": "sometimes"}, "overlap"),
        ({"catchup_s": 1}, "catchup_s"),
    ],
)
async def test_what_cannot_be_scheduled_is_named(
    client: httpx.AsyncClient, changes: dict[str, Any], param: str | None
) -> None:
    answer = await client.post("/v1/schedules", json={**PLAN, **changes})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await client.get("/v1/schedules")).json()["data"] == []


async def test_a_change_is_checked_as_the_whole_and_a_repeated_request_makes_one(client: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "once"}
    ids = {(await client.post("/v1/schedules", json=PLAN, headers=headers)).json()["id"] for _ in range(2)}
    assert len(ids) == 1
    at = f"/v1/schedules/{ids.pop()}"
    for body in ({"cron": "x"}, {"cron": "0 9 * * *", "every_s": 60}, {"tool_choice": "hammer"}):
        assert (await client.patch(at, json=body)).status_code == 400
    assert (await client.get(at)).json()["cron"] == PLAN["cron"]
    await client.post("/v1/agents/reviewer/archive")
    assert (await client.post("/v1/schedules", json=PLAN)).status_code == 400


async def test_a_trigger_names_its_session_and_a_repeated_one_is_the_same_run(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    plan = await made(client, paused=True)
    headers = {"Idempotency-Key": "now"}
    first, again = [
        (await client.post(f"/v1/schedules/{plan['id']}/trigger", headers=headers)).json() for _ in range(2)
    ]
    other = (await client.post(f"/v1/schedules/{plan['id']}/trigger")).json()
    assert first == again != other
    temporal: Client = app.state.temporal
    for run in (first, other):
        await temporal.get_workflow_handle(run["id"]).terminate()


async def test_changes_of_a_schedule_at_once_do_not_undo_each_other(client: httpx.AsyncClient) -> None:
    at = f"/v1/schedules/{(await made(client, paused=True))['id']}"
    changes: list[dict[str, Any]] = [{"message": "Two."}, {"jitter_s": 7}, {"description": "d"}, {"catchup_s": 99}]
    await asyncio.gather(*(client.patch(at, json=one) for one in changes))
    now = (await client.get(at)).json()
    assert [{name: now[name] for name in one} for one in changes] == changes
