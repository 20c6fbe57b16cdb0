"""Sessions of every tenant, as an operator finds and stops them."""

from __future__ import annotations

import dataclasses
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from runtime.api.counts import Counts
from runtime.store import Database, fleet, sessions
from tests.runtime.api.test_keys import bearer, make

PATH = "/v1/admin/sessions"


@pytest.fixture
async def made(client: httpx.AsyncClient, app: FastAPI) -> list[str]:
    """Five sessions, oldest first: three of the default tenant, two of acme; the first one has ended."""
    await client.post("/v1/admin/tenants", json={"id": "acme"})
    acme = bearer((await make(client, tenant="acme"))["key"])
    answers = [await client.post("/v1/sessions", json={}, headers=key) for key in ({}, {}, {}, acme, acme)]
    ids = [answer.json()["id"] for answer in answers]
    db: Database = app.state.db
    await sessions.finish(db, ids[0], "cancelled", {})
    await sessions.place(db, ids[1], "n", "b")
    await fleet.note_residency(db, ids[1], "default", "host", {})
    await db.execute("UPDATE sessions SET created_at = now() - interval '2 hours' WHERE session_id = $1", ids[1])
    await db.execute("UPDATE sessions SET created_at = now() - interval '3 hours' WHERE session_id = $1", ids[0])
    return ids


async def found(client: httpx.AsyncClient, **params: Any) -> list[str]:
    answer = await client.get(PATH, params=params)
    assert answer.status_code == 200, answer.text
    return [one["id"] for one in answer.json()["data"]]


async def test_sessions_are_found_by_what_is_known_of_them(client: httpx.AsyncClient, made: list[str]) -> None:
    assert await found(client) == made[::-1]
    assert await found(client, order="oldest") == made
    assert await found(client, tenant="acme", order="oldest") == made[3:]
    assert await found(client, state=["cancelled", "provisioning"], order="oldest") == made[:2]
    assert await found(client, node="n") == await found(client, tier="host") == [made[1]]
    assert await found(client, older_than_s=3600, order="oldest") == made[:2]
    assert await found(client, model="none") == []
    assert await found(client, text=made[2][6:20]) == [made[2]]
    assert await found(client, text="%") == []
    first = (await client.get(PATH, params={"limit": 2, "order": "oldest"})).json()
    assert (first["has_more"], first["last_id"]) == (True, made[1])
    assert await found(client, order="oldest", after=first["last_id"]) == made[2:]
    for wrong in ({"state": "odd"}, {"after": "ses_none"}, {"older_than_s": "nan"}, {"older_than_s": -1}):
        assert (await client.get(PATH, params=wrong)).status_code == 400


async def test_sessions_are_cancelled_by_their_ids(client: httpx.AsyncClient, made: list[str]) -> None:
    answer = await client.post(f"{PATH}/cancel", json={"ids": [made[0], made[2], made[3], "ses_none"]})
    assert (answer.status_code, answer.json()) == (
        202,
        {"object": "cancellation", "cancelling": 2, "ended_before": 1, "missing": ["ses_none"]},
    )
    assert await found(client, state="cancelling", order="oldest") == [made[2], made[3]]
    (noted,) = (await client.get("/v1/admin/audit", params={"action": "sessions.cancel"})).json()["data"]
    assert (noted["detail"]["sessions"], noted["detail"]["ids"][0]) == (4, made[0])


async def test_a_filter_cancels_only_as_many_as_are_expected(client: httpx.AsyncClient, made: list[str]) -> None:
    body: dict[str, Any] = {"filter": {"tenant": "default"}, "expect": 3}
    refused = await client.post(f"{PATH}/cancel", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "count_differs")
    assert "finds 2 open sessions, not 3" in refused.json()["detail"]
    assert await found(client, state="cancelling") == []
    for _ in range(2):  # a repeat, as after an answer that was lost, goes on with the same ones
        done = await client.post(f"{PATH}/cancel", json={**body, "expect": 2}, headers={"Idempotency-Key": "k"})
        assert (done.status_code, done.json()["cancelling"]) == (202, 2)
    assert await found(client, state="cancelling", order="oldest") == made[1:3]
    for wrong in (
        {},
        {"ids": []},
        {"ids": ["x"] * 1001},
        {"ids": ["x"], "filter": {}, "expect": 0},
        {"filter": {}},
        {"ids": ["x"], "expect": 1},
        {"filter": {"older_than_s": 1e12}, "expect": 0},
    ):
        assert (await client.post(f"{PATH}/cancel", json=wrong)).status_code == 400, wrong


async def test_the_installation_is_seen_at_a_glance(client: httpx.AsyncClient, made: list[str], app: FastAPI) -> None:
    await app.state.db.execute(
        "INSERT INTO usage (session_id, step_no, attempt_no, tenant_id, model, kind, sampled, host, computed, tool_ms)"
        " VALUES ('s', 1, 1, 'acme', 'm', 'think', 5, 7, 9, 0)"
    )
    seen = (await client.get("/v1/admin/overview")).json()
    assert seen["sessions"] == {"cancelled": 1, "created": 3, "provisioning": 1}
    assert (seen["nodes"], seen["questions_open"], seen["sandboxes_live"]) == ({"up": 1}, 0, 0)
    today = {"sampled": 5, "device": 0, "host": 7, "nvme": 0, "shared": 0, "recomputed": 0, "computed": 9}
    assert seen["tokens_today"] == today
    assert set(seen["process"]) == {field.name for field in dataclasses.fields(Counts)}
