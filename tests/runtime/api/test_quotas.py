"""Quotas: what would pass one is refused whole, with what is used and what there may be."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from runtime.store import Database, quotas, sandboxes, sessions
from tests.runtime.api.test_keys import bearer, make

MIB = 2**20


@pytest.fixture
async def acme(client: httpx.AsyncClient) -> httpx.AsyncClient:
    """As a tenant of its own."""
    await client.post("/v1/admin/tenants", json={"id": "acme"})
    key = (await make(client, tenant="acme"))["key"]
    client.headers["X-Admin"] = client.headers["Authorization"]
    client.headers.update(bearer(key))
    return client


async def allow(client: httpx.AsyncClient, **limits: Any) -> None:
    admin = {"Authorization": client.headers["X-Admin"]}
    changed = await client.patch("/v1/admin/tenants/acme", json={"quotas": limits}, headers=admin)
    assert changed.status_code == 200, changed.text


async def count(client: httpx.AsyncClient) -> int:
    return len((await client.get("/v1/sessions")).json()["data"])


async def test_creates_at_once_cannot_pass_the_quota_of_open_sessions(acme: httpx.AsyncClient) -> None:
    await allow(acme, open_sessions=3)
    answers = await asyncio.gather(*(acme.post("/v1/sessions", json={}) for _ in range(8)))
    refused = [answer for answer in answers if answer.status_code != 201]
    assert (len(refused), await count(acme)) == (5, 3)
    error = refused[0].json()["error"]
    assert (refused[0].status_code, error["code"], error["param"]) == (403, "quota_exceeded", "open_sessions")
    assert "3 of 3 sessions are open" in error["message"]
    last = next(answer.json()["id"] for answer in answers if answer.status_code == 201)
    fork = await acme.post(f"/v1/sessions/{last}/fork", json={})
    assert (fork.status_code, fork.json()["error"]["code"], await count(acme)) == (403, "quota_exceeded", 3)


async def test_a_session_that_ended_makes_room_and_a_repeat_needs_none(acme: httpx.AsyncClient, app: FastAPI) -> None:
    await allow(acme, open_sessions=1)
    headers = {"Idempotency-Key": "one"}
    first = (await acme.post("/v1/sessions", json={}, headers=headers)).json()
    assert (await acme.post("/v1/sessions", json={}, headers=headers)).json() == first
    waits = {"Idempotency-Key": "two"}
    assert (await acme.post("/v1/sessions", json={}, headers=waits)).status_code == 403
    await sessions.finish(app.state.db, first["id"], "cancelled", {})
    assert (await acme.post("/v1/sessions", json={}, headers=waits)).status_code == 201


async def test_workspaces_of_open_sessions_count_by_their_limits(acme: httpx.AsyncClient) -> None:
    await allow(acme, disk_bytes=100 * MIB)
    for size, status in ((60, 201), (41, 403), (40, 201), (1, 403)):
        answer = await acme.post("/v1/sessions", json={"limits": {"workspace_bytes": size * MIB}})
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "disk_bytes"
    assert f"{100 * MIB} of {100 * MIB} bytes" in answer.json()["detail"]


async def test_tokens_of_the_day_are_looked_at_when_a_message_comes(acme: httpx.AsyncClient, app: FastAPI) -> None:
    db: Database = app.state.db
    await allow(acme, tokens_per_day=100)
    session = (await acme.post("/v1/sessions", json={})).json()["id"]
    await db.execute(
        "INSERT INTO usage (session_id, step_no, attempt_no, tenant_id, model, kind, sampled, host, computed, tool_ms,"
        " settled_at) SELECT 'ses_1', nth, 1, 'acme', 'm', 'think', 20, 500, CASE nth WHEN 1 THEN 79 END, 0, at"
        " FROM (VALUES (1, now()), (2, date_trunc('day', now(), 'UTC') - interval '1 second')) AS one (nth, at)"
    )
    path = f"/v1/sessions/{session}/events"
    assert (await acme.post(path, json={"content": "hi"})).status_code == 202
    await db.execute("UPDATE usage SET sampled = 21")
    refused = await acme.post(path, json={"content": "more"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert "100 of 100 tokens" in refused.json()["detail"]
    midnight = datetime.datetime.now(datetime.UTC).replace(hour=0, minute=0, second=0) + datetime.timedelta(days=1)
    left_s = (midnight - datetime.datetime.now(datetime.UTC)).total_seconds()
    assert -90 <= int(refused.headers["retry-after"]) - left_s <= 90
    assert len(await db.fetch("SELECT FROM messages")) == 1
    assert (await quotas.used(db, "acme")).tokens_per_day == 100


async def test_a_tenant_without_quotas_is_not_held_up(acme: httpx.AsyncClient, app: FastAPI) -> None:
    await allow(acme, open_sessions=0)
    assert (await acme.post("/v1/sessions", json={})).status_code == 403
    other = {"Authorization": acme.headers["X-Admin"]}
    assert (await acme.post("/v1/sessions", json={}, headers=other)).status_code == 201


async def test_sandboxes_of_a_tenant_are_had_in_turn(acme: httpx.AsyncClient, app: FastAPI) -> None:
    db: Database = app.state.db
    names = [(await acme.post("/v1/sessions", json={})).json()["id"] for _ in range(4)]
    assert (await quotas.turn_for_sandbox(db, "acme", names[0])).may  # no quota: nothing is noted
    await allow(acme, sandboxes=2)
    turns = await asyncio.gather(*(quotas.turn_for_sandbox(db, "acme", name) for name in names))
    first = [name for name, turn in zip(names, turns, strict=True) if turn.may]
    waiting = [
        row["session_id"] for row in await db.fetch("SELECT session_id FROM sandbox_turns ORDER BY seq OFFSET 2")
    ]
    assert (len(first), set(waiting)) == (2, set(names) - set(first))
    for name in first:
        await sandboxes.open_one(db, "acme", name, f"sb_{name}", "n", "fake")
    assert [(await quotas.turn_for_sandbox(db, "acme", name)).may for name in waiting] == [False, False]
    await sandboxes.close(db, f"sb_{first[0]}")
    assert not (await quotas.turn_for_sandbox(db, "acme", waiting[1])).may
    assert (await quotas.turn_for_sandbox(db, "acme", waiting[0])).may
    await quotas.leave_queue(db, waiting[0])
    assert (await quotas.turn_for_sandbox(db, "acme", waiting[1])).may
    await quotas.turn_for_sandbox(db, "acme", waiting[0])
    await db.execute(
        "UPDATE sandbox_turns SET renewed_at = now() - interval '1 minute' WHERE session_id = $1", waiting[1]
    )
    assert (await quotas.turn_for_sandbox(db, "acme", waiting[0])).may  # whoever was before has gone
    assert (await quotas.turn_for_sandbox(db, "default", names[0])).may
