"""Keys: shown once, counted, ended in every way that a key ends."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from runtime.store import Database
from tests.runtime.api.conftest import KEY

ADMIN = "/v1/admin/keys"


async def make(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(ADMIN, json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_key_is_shown_once_and_kept_as_its_hash(client: httpx.AsyncClient, app: FastAPI) -> None:
    made = await make(client, name="ci")
    assert made["key"].startswith(made["prefix"])
    assert (made["state"], made["scope"], made["tenant"], made["name"]) == ("active", "use", "default", "ci")
    for path in (ADMIN, f"{ADMIN}/{made['id']}", "/v1/admin/audit"):
        assert made["key"] not in (await client.get(path)).text
    db: Database = app.state.db
    rows = await db.fetch("SELECT to_jsonb(k)::text AS row FROM api_keys k")
    assert all(made["key"] not in row["row"] for row in rows)
    assert (await client.get("/v1/sessions", headers=bearer(made["key"]))).status_code == 200


async def test_a_repeated_create_makes_no_second_key_and_does_not_show_the_first_again(
    client: httpx.AsyncClient,
) -> None:
    headers = {"Idempotency-Key": "k"}
    answers = await asyncio.gather(*(client.post(ADMIN, json={"name": "one"}, headers=headers) for _ in range(4)))
    assert {answer.status_code for answer in answers} == {201}
    shown = [answer.json() for answer in answers]
    assert len({one["id"] for one in shown}) == 1
    assert len([one for one in shown if one["key"]]) == 1
    (listed,) = [one for one in (await client.get(ADMIN)).json()["data"] if one["name"] == "one"]
    assert listed["id"] == shown[0]["id"]


async def test_keys_are_listed_newest_first_by_tenant_with_a_cursor(client: httpx.AsyncClient) -> None:
    await client.post("/v1/admin/tenants", json={"id": "acme"})
    made = [(await make(client, tenant="acme"))["id"] for _ in range(3)]
    page = (await client.get(ADMIN, params={"tenant": "acme", "limit": 2})).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([made[2], made[1]], True)
    rest = (await client.get(ADMIN, params={"tenant": "acme", "after": page["last_id"]})).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([made[0]], False)
    assert (await client.get(ADMIN, params={"after": "key_none"})).status_code == 400


async def test_a_revoked_key_is_refused(client: httpx.AsyncClient) -> None:
    made = await make(client)
    for _ in range(2):
        revoked = await client.post(f"{ADMIN}/{made['id']}/revoke")
        assert (revoked.status_code, revoked.json()["state"]) == (200, "revoked")
    answer = await client.get("/v1/sessions", headers=bearer(made["key"]))
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    done = (await client.get("/v1/admin/audit", params={"target": made["id"], "action": "keys.revoke"})).json()
    assert len(done["data"]) == 1


async def test_a_key_that_has_expired_is_refused_with_the_time(client: httpx.AsyncClient, app: FastAPI) -> None:
    ahead = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    made = await make(client, expires_at=ahead.isoformat())
    assert (await client.get("/v1/keys/self", headers=bearer(made["key"]))).json()["expires_at"] is not None
    await app.state.db.execute("UPDATE api_keys SET expires_at = now() WHERE key_id = $1", made["id"])
    answer = await client.get("/v1/sessions", headers=bearer(made["key"]))
    assert answer.status_code == 401
    assert "expired at 20" in answer.json()["detail"]
    assert (await client.get(f"{ADMIN}/{made['id']}")).json()["state"] == "expired"


async def test_an_end_that_does_not_lie_ahead_is_refused(client: httpx.AsyncClient) -> None:
    far = ("9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00", "2200-01-01T00:00:00Z")
    for expires_at in ("2020-01-01T00:00:00Z", *far, 4_000_000_000, "4000000000", "x", True):
        answer = await client.post(ADMIN, json={"expires_at": expires_at})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "expires_at"), expires_at


async def test_the_last_admin_key_cannot_be_revoked_and_of_two_only_one(client: httpx.AsyncClient) -> None:
    (first,) = (await client.get(ADMIN)).json()["data"]
    answer = await client.post(f"{ADMIN}/{first['id']}/revoke")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "last_admin_key")
    assert "create another one first" in answer.json()["detail"]
    second = await make(client, scope="admin")
    ended = await asyncio.gather(
        client.post(f"{ADMIN}/{first['id']}/revoke", headers=bearer(second["key"])),
        client.post(f"{ADMIN}/{second['id']}/revoke"),
    )
    assert sorted(one.status_code for one in ended) in ([200, 401], [200, 409])
    left = [(await client.get(ADMIN, headers=bearer(key))).status_code for key in (KEY, second["key"])]
    assert sorted(left) == [200, 401]


async def test_an_admin_key_in_its_grace_is_no_reason_to_revoke_its_successor(client: httpx.AsyncClient) -> None:
    (first,) = (await client.get(ADMIN)).json()["data"]
    turned = (await client.post(f"{ADMIN}/{first['id']}/rotate", json={"grace_s": 3600})).json()
    answer = await client.post(f"{ADMIN}/{turned['id']}/revoke")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "last_admin_key")


async def test_the_tenant_of_the_last_admin_key_cannot_be_disabled(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/admin/tenants/default/disable")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "last_admin_key")
    assert (await client.get("/v1/admin/tenants/default")).json()["state"] == "enabled"


async def test_a_rotated_key_works_as_long_as_its_grace(client: httpx.AsyncClient) -> None:
    made = await make(client, name="ci", requests_per_minute=50)
    headers = {"Idempotency-Key": "turn"}
    path = f"{ADMIN}/{made['id']}/rotate"
    turned = (await client.post(path, json={"grace_s": 3600}, headers=headers)).json()
    assert (turned["name"], turned["requests_per_minute"]) == ("ci", 50)
    for key in (made["key"], turned["key"]):
        assert (await client.get("/v1/sessions", headers=bearer(key))).status_code == 200
    old = (await client.get(f"{ADMIN}/{made['id']}")).json()
    assert (old["rotated_to"], old["expires_at"] is not None) == (turned["id"], True)
    again = (await client.post(path, json={"grace_s": 3600}, headers=headers)).json()
    assert (again["id"], again["key"]) == (turned["id"], None)
    twice = await client.post(path, json={})
    assert (twice.status_code, turned["id"] in twice.json()["detail"]) == (409, True)
    last = (await client.post(f"{ADMIN}/{turned['id']}/rotate", json={"grace_s": 0})).json()
    assert (await client.get("/v1/sessions", headers=bearer(turned["key"]))).status_code == 401
    assert (await client.get("/v1/sessions", headers=bearer(last["key"]))).status_code == 200
    assert (await client.post(path, json={"grace_s": 30 * 86_400 + 1})).status_code == 400


async def test_a_key_says_of_itself_what_it_is(client: httpx.AsyncClient) -> None:
    await client.post("/v1/admin/tenants", json={"id": "acme", "quotas": {"sandboxes": 2}})
    made = await make(client, tenant="acme", requests_per_minute=9)
    own = (await client.get("/v1/keys/self", headers=bearer(made["key"]))).json()
    assert (own["id"], own["tenant"], own["scope"], own["requests_per_minute"]) == (made["id"], "acme", "use", 9)
    assert own["quotas"] == {"open_sessions": None, "tokens_per_day": None, "disk_bytes": None, "sandboxes": 2}


async def test_when_a_key_was_used_is_noted_once_a_minute(client: httpx.AsyncClient, app: FastAPI) -> None:
    made = await make(client)

    async def used() -> str:
        return str((await client.get(f"{ADMIN}/{made['id']}")).json()["last_used_at"])

    assert await used() == "None"
    await client.get("/v1/sessions", headers=bearer(made["key"]))
    first = await used()
    await client.get("/v1/sessions", headers=bearer(made["key"]))
    assert await used() == first != "None"
    db: Database = app.state.db
    await db.execute("UPDATE api_keys SET last_used_at = last_used_at - interval '2 minutes'")
    await client.get("/v1/sessions", headers=bearer(made["key"]))
    assert await used() > first


async def test_every_answer_names_its_request(client: httpx.AsyncClient) -> None:
    given = await client.get("/v1/sessions", headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    for odd in ("", "a b", "x" * 129, "\u00e9"):
        headers = [(b"X-Request-Id", odd.encode("latin-1"))]
        answer = await client.get("/v1/sessions", headers=headers)
        assert answer.headers["x-request-id"].startswith("req_")
    for refused in (
        await client.get("/v1/sessions/none"),
        await client.get("/v1/none"),
        await client.get("/v1/sessions", headers={"Authorization": "Bearer no"}),
        await client.get("/v1/sessions", headers={"Host": "evil.example"}),
        await client.post("/v1/sessions", content=b"{"),
    ):
        assert refused.json()["request_id"] == refused.headers["x-request-id"] != ""


async def test_a_failure_that_nobody_meant_is_named_in_the_log(
    client: httpx.AsyncClient, app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    app.state.temporal = app.state.chats = None
    answer = await client.post("/v1/sessions", json={}, headers={"X-Request-Id": "mine-2"})
    assert (answer.status_code, answer.headers["x-request-id"], answer.json()["request_id"]) == (
        500,
        "mine-2",
        "mine-2",
    )
    assert any("mine-2" in record.getMessage() for record in caplog.records)
