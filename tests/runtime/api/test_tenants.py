"""Tenants: made with a salt of their own, disabled without losing anything."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from runtime.store import Database
from tests.runtime.api.test_keys import bearer, make

PATH = "/v1/admin/tenants"


async def test_each_tenant_has_a_salt_of_its_own(client: httpx.AsyncClient, app: FastAPI) -> None:
    for name in ("acme", "other-1"):
        assert (await client.post(PATH, json={"id": name})).status_code == 201
    db: Database = app.state.db
    salts = {row["salt"] for row in await db.fetch("SELECT salt FROM tenants")}
    assert {len(salt) for salt in salts} == {32}
    assert len(salts) == 3
    again = [await client.post(PATH, json={"id": "new"}, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert [one.status_code for one in again] == [201, 201]
    twice = await client.post(PATH, json={"id": "acme"})
    assert (twice.status_code, twice.json()["error"]["code"]) == (409, "tenant_exists")


async def test_tenants_are_listed_by_name_with_a_cursor(client: httpx.AsyncClient) -> None:
    for name in ("b", "a", "c"):
        await client.post(PATH, json={"id": name})
    page = (await client.get(PATH, params={"limit": 2})).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (["a", "b"], True)
    rest = (await client.get(PATH, params={"after": page["last_id"]})).json()
    assert [one["id"] for one in rest["data"]] == ["c", "default"]
    assert (await client.get(PATH, params={"after": "none"})).status_code == 400


async def test_a_name_that_is_none_is_refused(client: httpx.AsyncClient) -> None:
    for name in ("", "A", "a_b", "a" * 64, "a/b", "\u00e4", "a\n", None, 5):
        assert (await client.post(PATH, json={"id": name})).status_code == 400, name


async def test_keys_of_a_disabled_tenant_are_refused_and_its_sessions_stay(client: httpx.AsyncClient) -> None:
    await client.post(PATH, json={"id": "acme"})
    key = bearer((await make(client, tenant="acme"))["key"])
    session = (await client.post("/v1/sessions", json={}, headers=key)).json()
    for _ in range(2):
        assert (await client.post(f"{PATH}/acme/disable")).json()["state"] == "disabled"
    answer = await client.get(f"/v1/sessions/{session['id']}", headers=key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "tenant_disabled")
    for _ in range(2):
        assert (await client.post(f"{PATH}/acme/enable")).json()["state"] == "enabled"
    assert (await client.get(f"/v1/sessions/{session['id']}", headers=key)).json()["state"] == "created"


async def test_a_quota_that_is_not_named_stays_as_it_is(client: httpx.AsyncClient) -> None:
    await client.post(PATH, json={"id": "acme", "quotas": {"sandboxes": 2, "open_sessions": 5}})
    changed = (await client.patch(f"{PATH}/acme", json={"quotas": {"sandboxes": None, "disk_bytes": 7}})).json()
    assert changed["quotas"] == {"open_sessions": 5, "tokens_per_day": None, "disk_bytes": 7, "sandboxes": None}
    for quotas in (
        {"sandboxes": 0},
        {"open_sessions": -1},
        {"disk_bytes": 2**53},
        {"coins": 1},
        {"open_sessions": False},
    ):
        assert (await client.patch(f"{PATH}/acme", json={"quotas": quotas})).status_code == 400
    assert (await client.patch(f"{PATH}/none", json={"quotas": {}})).status_code == 404


async def test_what_an_operator_changes_is_written_down_with_who_and_what_came_of_it(
    client: httpx.AsyncClient, app: FastAPI
) -> None:
    await client.post(PATH, json={"id": "acme"}, headers={"X-Request-Id": "r1"})
    await client.post(PATH, json={"id": "acme"}, headers={"X-Request-Id": "r2"})
    await client.post("/v1/admin/nodes/n/drain", headers={"X-Request-Id": "r3"})
    await client.post("/v1/admin/nodes/none/drain", headers={"X-Request-Id": "r4"})
    await client.get("/v1/admin/nodes")
    log = (await client.get("/v1/admin/audit")).json()["data"]
    assert [(one["request_id"], one["action"], one["target"], one["outcome"]) for one in log] == [
        ("r4", "nodes.drain", "none", "refused"),
        ("r3", "nodes.drain", "n", "done"),
        ("r2", "tenants.create", None, "refused"),
        ("r1", "tenants.create", "acme", "done"),
    ]
    assert log[2]["detail"] == {"status": 409, "code": "tenant_exists"}
    assert {one["key_id"] for one in log} == {(await client.get("/v1/keys/self")).json()["id"]}
    refused = (await client.get("/v1/admin/audit", params={"outcome": "refused", "limit": 1})).json()
    assert ([one["request_id"] for one in refused["data"]], refused["has_more"]) == (["r4"], True)
    rest = (await client.get("/v1/admin/audit", params={"outcome": "refused", "after": refused["last_id"]})).json()
    assert [one["request_id"] for one in rest["data"]] == ["r2"]
    db: Database = app.state.db
    for change in ("UPDATE admin_actions SET outcome = 'done'", "DELETE FROM admin_actions"):
        with pytest.raises(Exception, match="immutable"):
            await db.execute(change)


@pytest.mark.parametrize("path", ["/v1/admin/keys/%00/revoke", f"{PATH}/a%00b/disable", "/v1/admin/none%00"])
async def test_an_address_that_no_row_can_hold_is_refused_and_written_down(
    client: httpx.AsyncClient, path: str
) -> None:
    refused = await client.post(path)
    assert refused.status_code in (400, 404)
    (noted,) = (await client.get("/v1/admin/audit")).json()["data"]
    assert (noted["outcome"], noted["request_id"]) == ("refused", refused.json()["request_id"])
