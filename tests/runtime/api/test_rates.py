"""The rate of a key: what is left of it is said with every answer, also by another process of the API."""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI

from runtime.store import Database
from tests.runtime.api.test_keys import bearer, make

REMAINING, RESET = "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"


async def test_a_key_with_a_rate_is_told_what_is_left_and_refused_when_nothing_is(
    client: httpx.AsyncClient, app: FastAPI
) -> None:
    made = await make(client, requests_per_minute=3)
    key = bearer(made["key"])
    left = [await client.get("/v1/sessions", headers=key) for _ in range(3)]
    assert [one.headers[REMAINING] for one in left] == ["2", "1", "0"]
    assert {one.headers["x-ratelimit-limit-requests"] for one in left} == {"3"}
    assert left[0].headers[RESET] == "20.0s"
    refused = await client.post("/v1/sessions", content=b"no json", headers=key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers[REMAINING] == "0"
    assert refused.headers["x-request-id"] == refused.json()["request_id"]
    for path in ("/healthz", "/readyz"):
        assert REMAINING not in (await client.get(path, headers=key)).headers
    assert REMAINING not in (await client.get("/v1/sessions")).headers
    db: Database = app.state.db
    await db.execute("UPDATE rate_buckets SET filled_at = filled_at - interval '20 seconds'")
    for expected in (200, 429):
        assert (await client.get("/v1/sessions", headers=key)).status_code == expected
    await db.execute("UPDATE rate_buckets SET filled_at = filled_at - interval '2 hours'")
    full = await client.get("/v1/none", headers=key)
    assert (full.status_code, full.headers[REMAINING]) == (404, "2")


async def test_requests_at_once_do_not_share_a_token(client: httpx.AsyncClient) -> None:
    key = bearer((await make(client, requests_per_minute=5))["key"])
    answers = await asyncio.gather(*(client.get("/v1/keys/self", headers=key) for _ in range(12)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 7


async def test_a_key_without_a_rate_costs_no_write(client: httpx.AsyncClient, app: FastAPI) -> None:
    await client.get("/v1/sessions")
    assert await app.state.db.fetch("SELECT FROM rate_buckets") == []
