"""An operator reaches what a tenant's key does, for them; nobody else reaches it that way."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from runtime.api.on_behalf import COLLECTIONS
from tests.runtime.api.test_keys import bearer, make


@pytest.fixture
async def acme(client: httpx.AsyncClient) -> dict[str, str]:
    await client.post("/v1/admin/tenants", json={"id": "acme"})
    return bearer((await make(client, tenant="acme"))["key"])


async def test_an_operator_sees_and_changes_a_tenants_session_and_the_log_says_whose(
    client: httpx.AsyncClient, acme: dict[str, str]
) -> None:
    session = (await client.post("/v1/sessions", json={}, headers=acme)).json()["id"]
    assert (await client.get(f"/v1/sessions/{session}")).status_code == 404
    found = await client.get(f"/v1/admin/tenants/acme/sessions/{session}")
    assert found.json()["id"] == session
    assert (await client.post(f"/v1/admin/tenants/acme/sessions/{session}/cancel")).status_code == 202
    noted = (await client.get("/v1/admin/audit")).json()["data"][0]
    assert (noted["action"], noted["target"]) == ("sessions.cancel", session)
    assert noted["detail"]["tenant"] == "acme"
    assert noted["tenant"] == "default"


async def test_what_is_made_that_way_is_the_tenants(client: httpx.AsyncClient, acme: dict[str, str]) -> None:
    made = await client.post("/v1/admin/tenants/acme/sessions", json={})
    assert made.status_code == 201
    assert (await client.get(f"/v1/sessions/{made.json()['id']}", headers=acme)).status_code == 200


async def test_a_key_of_scope_use_gets_nowhere_not_even_to_its_own(
    app: FastAPI, client: httpx.AsyncClient, acme: dict[str, str]
) -> None:
    """By the router's own list: every route of a collection that an operator may reach."""
    tried = 0
    for route in iter_route_contexts(app.routes):
        path = str(route.path)
        if path.split("/")[1:2] != ["v1"] or path.split("/")[2] not in COLLECTIONS:
            continue
        for method in getattr(route, "methods", None) or ():
            answer = await client.request(method, f"/v1/admin/tenants/acme/{path[4:]}", json={}, headers=acme)
            assert answer.status_code == 403, f"{method} {path}"
            tried += 1
    assert tried > 50


async def test_a_tenant_that_there_is_none_of_is_said(client: httpx.AsyncClient) -> None:
    for tenant in ("nobody", "no%00body", "%2e%2e", "a" * 500):
        answer = await client.get(f"/v1/admin/tenants/{tenant}/sessions")
        assert answer.status_code in (404, 400), tenant
    assert (await client.get("/v1/admin/tenants/nobody/sessions")).json()["error"]["code"] == "not_found"


async def test_no_header_makes_a_request_one_of_this_process(app: FastAPI) -> None:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for name in ("tenuto.key_id", "tenuto-key-id", "x-tenuto-key-id"):
            assert (await http.get("/v1/admin/keys", headers={name: "key_admin"})).status_code == 401
