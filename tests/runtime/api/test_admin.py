"""What an operator asks, and who may ask."""

from __future__ import annotations

import hashlib

from runtime.store import Database, fleet


async def test_nodes_are_listed_with_their_state_and_a_drain_is_asked_for(client, dsn):
    (node,) = (await client.get("/v1/admin/nodes")).json()["data"]
    assert (node["id"], node["state"], node["sessions"]) == ("n", "up", 0)
    asked = await client.post("/v1/admin/nodes/n/drain")
    assert (asked.status_code, asked.json()["state"]) == (202, "draining")
    async with Database(dsn) as db:
        assert await fleet.heartbeat(db, "n", "b")
        await fleet.note_drained(db, "n", "b")
    (node,) = (await client.get("/v1/admin/nodes")).json()["data"]
    assert node["state"] == "drained"


async def test_a_node_that_nobody_knows_cannot_be_drained(client):
    answer = await client.post("/v1/admin/nodes/nobody/drain")
    assert (answer.status_code, answer.json()["detail"]) == (404, "there is no node nobody")


async def test_a_key_that_may_only_use_sessions_is_refused(client, dsn):
    async with Database(dsn) as db:
        await db.execute(
            "INSERT INTO api_keys (key_id, tenant_id, sha256, scope) VALUES ('key_use', $1, $2, 'use')",
            fleet.DEFAULT_TENANT,
            hashlib.sha256(b"tk_use").digest(),
        )
    headers = {"Authorization": "Bearer tk_use"}
    assert (await client.get("/v1/sessions", headers=headers)).status_code == 200
    for method, path in (("GET", "nodes"), ("POST", "nodes/n/drain"), ("POST", "reconcile")):
        answer = await client.request(method, f"/v1/admin/{path}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
