"""Webhooks at the API: where they may point, secrets shown once, deliveries and replays."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from runtime import webhooks
from runtime.store import Database
from runtime.store.webhooks import MOST
from runtime.tools.egress import Egress
from sandbox.allow import parse_allow
from tests.runtime.api.test_secrets import every_row

HOOK: dict[str, Any] = {"url": "https://hooks.example.org/t", "types": ["session.created", "budget.*"]}


@pytest.fixture(autouse=True)
def _allowed(app: FastAPI) -> None:
    app.state.egress = Egress(parse_allow("*.example.org"))


async def made(client: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    answer = await client.post("/v1/webhooks", json={**HOOK, **changes})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def test_a_secret_is_shown_once_and_lies_sealed(app: FastAPI, client: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "once"}
    first, again = [(await client.post("/v1/webhooks", json=HOOK, headers=headers)).json() for _ in range(2)]
    assert (first["id"], again["secret"]) == (again["id"], None)
    assert first["secret"].startswith("whsec_")
    rotated = (await client.post(f"/v1/webhooks/{first['id']}/rotate", json={"overlap_s": 60}, headers=headers)).json()
    assert rotated["error"]["code"] == "idempotency_mismatch"
    keys = {"Idempotency-Key": "twice"}
    answers = [
        (await client.post(f"/v1/webhooks/{first['id']}/rotate", json={}, headers=keys)).json() for _ in range(2)
    ]
    assert answers[0]["secret"] not in (None, first["secret"])
    assert (answers[1]["secret"], answers[1]["old_secret_until"] is not None) == (None, True)
    rows = await every_row(app.state.db)
    shown = [(await client.get(path)).text for path in ("/v1/webhooks", f"/v1/webhooks/{first['id']}")]
    for secret in (first["secret"], answers[0]["secret"]):
        assert secret.removeprefix("whsec_") not in rows + "".join(shown)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"url": "https://elsewhere.org/"}, "host_not_allowed"),
        ({"url": "http://127.0.0.1:8300/"}, "host_not_allowed"),
        ({"url": "ftp://hooks.example.org/"}, "invalid_request"),
        ({"url": "https://user:word@hooks.example.org/"}, "invalid_request"),
        ({"types": []}, "invalid_request"),
        ({"types": ["*"]}, "invalid_request"),
        ({"types": ["session"]}, "invalid_request"),
        ({"types": ["model.delta"]}, "invalid_request"),
        ({"types": ["model.*"]}, "invalid_request"),
        ({"types": ["session.%"]}, "invalid_request"),
    ],
)
async def test_what_cannot_be_told_is_refused(client: httpx.AsyncClient, changes: dict[str, Any], code: str) -> None:
    answer = await client.post("/v1/webhooks", json={**HOOK, **changes})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert (await client.get("/v1/webhooks")).json()["data"] == []


async def test_a_webhook_is_changed_disabled_and_deleted_with_its_deliveries(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    hook = await made(client)
    at = f"/v1/webhooks/{hook['id']}"
    assert (await client.patch(at, json={"url": "https://elsewhere.org/"})).status_code == 400
    assert (await client.patch(at, json={})).status_code == 400
    changed = (await client.patch(at, json={"types": ["session.*"], "disabled": True})).json()
    assert (changed["types"], changed["url"], changed["disabled"]) == (["session.*"], HOOK["url"], True)
    assert changed["disabled_why"] == "its owner asked for it"
    await client.post("/v1/sessions", json={})
    assert (await client.get(f"{at}/deliveries")).json()["data"] == []
    assert (await client.patch(at, json={"disabled": False})).json()["disabled_why"] is None
    session = (await client.post("/v1/sessions", json={})).json()["id"]
    [delivery] = (await client.get(f"{at}/deliveries", params={"state": "pending"})).json()["data"]
    assert (delivery["type"], delivery["session_id"], delivery["event"]) == ("session.created", session, 1)
    assert (await client.delete(at)).json()["deleted"]
    db: Database = app.state.db
    assert await db.fetch("SELECT FROM webhook_deliveries") == []
    assert (await client.get(at)).status_code == 404


async def test_a_test_is_queued_once_for_a_key_and_what_is_being_sent_cannot_be_replayed(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    hook = await made(client)
    at = f"/v1/webhooks/{hook['id']}"
    headers = {"Idempotency-Key": "test"}
    one, two = [(await client.post(f"{at}/test", headers=headers)).json() for _ in range(2)]
    assert (one["id"], one["type"], one["state"]) == (two["id"], "webhook.test", "pending")
    refused = await client.post(f"{at}/deliveries/{one['id']}/replay")
    assert (refused.status_code, "still being sent" in refused.json()["detail"]) == (409, True)
    db: Database = app.state.db
    await db.execute("UPDATE webhook_deliveries SET state = 'delivered', attempts = 1")
    again = await client.post(f"{at}/deliveries/{one['id']}/replay")
    assert (again.status_code, again.json()["state"], again.json()["round"]) == (202, "pending", 2)
    page = (await client.get(f"{at}/deliveries", params={"limit": 1})).json()
    assert page["last_id"] == one["id"]
    rest = await client.get(f"{at}/deliveries", params={"after": one["id"]})
    assert rest.json()["data"] == []


async def test_another_tenants_webhooks_are_nobodys(app: FastAPI, client: httpx.AsyncClient) -> None:
    hook = await made(client)
    db: Database = app.state.db
    await db.execute("INSERT INTO tenants (tenant_id, salt) VALUES ('other', sha256('x'))")
    await db.execute("UPDATE webhooks SET tenant_id = 'other'")
    await client.post("/v1/sessions", json={})
    assert await db.fetch("SELECT FROM webhook_deliveries") == []
    at = f"/v1/webhooks/{hook['id']}"
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/test"), ("POST", "/rotate"), ("GET", "/deliveries")):
        body = {"json": {}} if path == "/rotate" else {}
        assert (await client.request(method, at + path, **body)).status_code == 404


async def test_a_tenant_has_a_bounded_number_of_webhooks(app: FastAPI, client: httpx.AsyncClient) -> None:
    db: Database = app.state.db
    hook = await made(client)
    await db.execute(
        "INSERT INTO webhooks SELECT webhook_id || n, tenant_id, url, types, description, secret FROM webhooks,"
        " generate_series(2, $1) n",
        MOST,
    )
    refused = await client.post("/v1/webhooks", json=HOOK)
    assert (refused.status_code, hook["disabled"]) == (409, False)


def test_a_signature_is_the_one_of_the_specification() -> None:
    """The example of the Standard Webhooks libraries."""
    signed = webhooks.signature(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
