"""Another tenant's things look like none: every route that there is, whoever wrote it, with ids that are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts

from runtime.store import Database
from runtime.tools.egress import Egress
from sandbox.allow import parse_allow
from tests.runtime.api.test_keys import bearer, make

MARK = "hunter22"  # stands in everything that the other tenant wrote
# What is nobody's own: models are the installation's, for every tenant.
SHARED = {"model"}
# Routes that need more than an empty body to get as far as looking for the thing.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/sessions/{session_id}/events": {"content": "hi"},
    "/v1/sessions/{session_id}/rewind": {"step": 1},
    "/v1/approvals/{question_id}": {"decision": "approve"},
}
# One puts a thing of one's own there, whatever others have under that name.
OWN = {("PUT", "/v1/secrets/{secret}")}
# What a node would have to answer, of which there is none here: only that it is refused is seen of these.
ON_A_NODE = "/sandbox"
# Query parameters that name a thing, where one could look through them at what is the other tenant's.
NAMING = ("after", "session", "agent", "schedule", "webhook")
OPEN = ("/healthz", "/readyz")


@dataclass
class Two:
    """The one whose things they are, and the one who asks for them. `things`: what a path's parameters name, by name,
    or by collection and name. A route with a new parameter needs a thing here before it is merged."""

    owner: dict[str, str]
    stranger: dict[str, str]
    things: dict[str, Any]

    def thing(self, route: RouteContext, name: str) -> Any:
        path = str(route.path)
        key = f"{path.split('/')[2]}.{name}"
        assert {key, name} & set(self.things), f"{path}: say in `things` what {name} of another tenant is"
        return self.things.get(key, self.things.get(name))

    def path(self, app: FastAPI, route: RouteContext, method: str) -> str:
        names = named_in(app, route, method, "path")
        return str(route.path_format).format(**{name: self.thing(route, name) for name in names})

    @property
    def names(self) -> list[str]:
        return [value for value in self.things.values() if isinstance(value, str)]

    def betrayed(self, text: str, asked: str = "") -> bool:
        """Whether an answer says something of the owner's beyond what was in the question."""
        for one in (one for one in (*self.names, MARK) if one in asked):
            text = text.replace(one, "")
        return any(trace in text for trace in (MARK, "acme", *self.names))


@pytest.fixture
async def two(client: httpx.AsyncClient, app: FastAPI) -> Two:
    keys = {}
    for name in ("acme", "stranger"):
        await client.post("/v1/admin/tenants", json={"id": name})
        keys[name] = bearer((await make(client, tenant=name))["key"])
    app.state.egress = Egress(parse_allow("*.example.org"))
    return Two(keys["acme"], keys["stranger"], await _things(client, app.state.db, keys["acme"]))


async def _things(client: httpx.AsyncClient, db: Database, owner: dict[str, str]) -> dict[str, Any]:
    """One of each that there can be, made as their owner makes them."""

    async def make_one(path: str, body: dict[str, Any], method: str = "POST") -> dict[str, Any]:
        answer = await client.request(method, path, json=body, headers=owner)
        assert answer.is_success, answer.text
        return dict(answer.json())

    hook = {"url": f"https://hooks.example.org/{MARK}", "types": ["session.*"], "description": MARK}
    webhook = await make_one("/v1/webhooks", hook)
    agent = await make_one("/v1/agents", {"name": "owners-agent", "system": MARK})
    await make_one("/v1/secrets/OWNERS_SECRET", {"value": MARK}, "PUT")
    plan = {"agent": "owners-agent", "message": MARK, "cron": "0 9 * * mon-fri", "time_zone": "UTC"}
    schedule = await make_one("/v1/schedules", plan)
    session = await make_one("/v1/sessions", {"system": MARK})
    await make_one(f"/v1/sessions/{session['id']}/events", {"content": MARK})
    said = {"items": [{"role": "user", "content": MARK}], "metadata": {"said": MARK}}
    conversation = await make_one("/v1/conversations", said)
    items = (await client.get(f"/v1/conversations/{conversation['id']}/items", headers=owner)).json()
    told = await client.get(f"/v1/webhooks/{webhook['id']}/deliveries", headers=owner)
    things = {
        "session_id": session["id"],
        "step": 3,
        "call": 0,
        "path": "owners.txt",
        "change_id": "chg_of_owner",
        "exec_id": "exe_of_owner",
        "intent": "pin",
        "question_id": "qst_of_owner",
        "agent": agent["id"],
        "number": 1,
        "secret": "OWNERS_SECRET",
        "webhook_id": webhook["id"],
        "delivery_id": told.json()["data"][0]["id"],
        "schedule_id": schedule["id"],
        "conversation_id": conversation["id"],
        "item_id": items["data"][0]["id"],
        "response_id": "resp_of_owner",
    }
    await _fill(db, things)
    return things


async def _fill(db: Database, things: dict[str, Any]) -> None:
    """A step, a call's output, a question and what was used, which no node is here to make."""
    key = (things["session_id"], things["step"])
    await db.execute(
        "INSERT INTO steps (session_id, step_no, tenant_id, kind, state, token_start, output)"
        " VALUES ($1, $2, 'acme', 'tool', 'completed', 0, $3)",
        *key,
        {"text": MARK},
    )
    await db.execute(
        "INSERT INTO tool_calls (session_id, step_no, call_no, tenant_id, name, arguments, argument_digest, effect,"
        " status, fence, owner, lease_until, snapshot_before, result, output) VALUES ($1, $2, $3, 'acme', 'do', '{}',"
        " '', 'pure', 'settled', 1, 'n', now(), '', '{}', $4)",
        *key,
        things["call"],
        MARK.encode(),
    )
    await db.execute(
        "INSERT INTO questions (question_id, tenant_id, session_id, step_no, kind, about)"
        " VALUES ($3, 'acme', $1, $2, 'approval', $4)",
        *key,
        things["question_id"],
        {"name": MARK},
    )
    await db.execute(
        "INSERT INTO responses (response_id, tenant_id, session_id, from_pos, base, root, input, response, stored,"
        " expires_at) VALUES ($2, 'acme', $1, 0, '{}', '{}', '[]', $3, true, now() + interval '1 day')",
        things["session_id"],
        things["response_id"],
        {"output": MARK},
    )
    await db.execute(
        "INSERT INTO usage (session_id, step_no, attempt_no, tenant_id, model, kind, sampled, tool_ms)"
        f" VALUES ($1, $2, 1, 'acme', '{MARK}', 'tool', 1, 1)",
        *key,
    )


def routes(app: FastAPI, prefix: str = "/v1/") -> Iterator[tuple[str, RouteContext]]:
    """The router's own list, with the routers that it includes."""
    for route in iter_route_contexts(app.routes):
        if isinstance(route.original_route, APIRoute) and str(route.path).startswith(prefix):
            for method in sorted(route.methods or ()):
                yield method, route


def named_in(app: FastAPI, route: RouteContext, method: str, where: str) -> list[str]:
    described = app.openapi()["paths"][route.path_format][method.lower()]
    return [one["name"] for one in described.get("parameters", []) if one["in"] == where]


def query_of(app: FastAPI, route: RouteContext, method: str) -> dict[str, Any]:
    """What the query must say; any number will do."""
    described = app.openapi()["paths"][route.path_format][method.lower()].get("parameters", [])
    return {one["name"]: 1 for one in described if one["in"] == "query" and one.get("required")}


def body_of(app: FastAPI, route: RouteContext, method: str) -> dict[str, Any]:
    """A body that the route takes, as arguments of the client: what the document gives as an example, or some bytes."""
    if route.path in BODIES:
        return {"json": BODIES[str(route.path)]}
    described = app.openapi()["paths"][route.path_format][method.lower()].get("requestBody")
    if described is None:
        return {}
    if "application/json" not in described["content"]:
        return {"content": b"bytes"}
    schema = described["content"]["application/json"]["schema"]
    shape = app.openapi()["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return {"json": (shape.get("examples") or [{}])[0]}


def test_there_is_no_route_that_these_tests_do_not_see(app: FastAPI) -> None:
    found = list(iter_route_contexts(app.routes))
    others = {str(route.path) for route in found if not isinstance(route.original_route, APIRoute)}
    assert {path for path in others if path.startswith("/v1")} == {"/v1/openapi.json"}
    assert len(list(routes(app))) > 40
    documented = {(method.upper(), path) for path, verbs in app.openapi()["paths"].items() for method in verbs}
    assert {(method, route.path_format) for method, route in routes(app)} <= documented


async def test_a_thing_of_another_tenant_looks_like_none(client: httpx.AsyncClient, app: FastAPI, two: Two) -> None:
    seen = []
    for method, route in routes(app):
        names = named_in(app, route, method, "path")
        if set(names) <= SHARED or str(route.path).startswith("/v1/admin") or (method, route.path) in OWN:
            continue
        path = two.path(app, route, method)
        asked = {**body_of(app, route, method), "params": query_of(app, route, method)}
        answer = await client.request(method, path, **asked, headers=two.stranger)
        assert answer.status_code == 404, f"{method} {route.path} answers {answer.status_code}: {answer.text}"
        assert not two.betrayed(answer.text, path), f"{method} {route.path} tells {answer.text}"
        if method == "GET" and not path.endswith("/stream") and ON_A_NODE not in path:
            owned = await client.get(path, headers=two.owner)
            assert owned.status_code == 200, f"{route.path} does not know the thing of its owner: {owned.text}"
        seen.append(path)
    assert len(seen) > 40


async def test_no_list_has_anything_of_another_tenant_whatever_is_asked_of_it(
    client: httpx.AsyncClient, app: FastAPI, two: Two
) -> None:
    for method, route in routes(app):
        path = str(route.path)
        if method != "GET" or named_in(app, route, method, "path") or path.startswith("/v1/admin"):
            continue
        plain = await client.get(path, headers=two.stranger)
        assert plain.status_code == 200, f"{path}: {plain.text}"
        assert not two.betrayed(plain.text), f"{path} tells {plain.text}"
        for name in set(NAMING) & set(named_in(app, route, method, "query")):
            for one in two.names:
                answer = await client.get(path, params={name: one}, headers=two.stranger)
                assert answer.status_code in (200, 400, 404), answer.text
                assert not two.betrayed(answer.text, one), f"{path}?{name}={one} tells {answer.text}"


async def test_what_a_body_names_of_another_tenant_is_none_either(client: httpx.AsyncClient, two: Two) -> None:
    tool = {"name": "do", "description": "Do.", "command": ["true"], "env": {"A": {"secret": "OWNERS_SECRET"}}}
    plan = {"agent": "owners-agent", "message": "hi", "cron": "0 9 * * *"}
    bodies = (("sessions", {"agent": "owners-agent"}), ("sessions", {"tools": [tool]}), ("schedules", plan))
    for where, body in bodies:
        answer = await client.post(f"/v1/{where}", json=body, headers=two.stranger)
        assert answer.status_code in (400, 404), answer.text
        assert not two.betrayed(answer.text, str(body)), answer.text
        assert (await client.get(f"/v1/{where}", headers=two.stranger)).json()["data"] == []


async def test_a_name_of_another_tenant_can_be_ones_own_too(client: httpx.AsyncClient, two: Two) -> None:
    path = "/v1/secrets/OWNERS_SECRET"
    before = (await client.get(path, headers=two.owner)).json()
    assert (await client.put(path, json={"value": "other"}, headers=two.stranger)).status_code == 200
    assert (await client.delete(path, headers=two.stranger)).status_code == 200
    assert (await client.get(path, headers=two.owner)).json() == before


async def test_the_same_idempotency_key_of_two_tenants_makes_two_things(client: httpx.AsyncClient, two: Two) -> None:
    made = [
        (await client.post("/v1/sessions", json={}, headers={**key, "Idempotency-Key": "k"})).json()["id"]
        for key in (two.owner, two.stranger)
    ]
    assert made[0] != made[1]


async def test_what_an_operator_does_takes_a_key_of_scope_admin(
    client: httpx.AsyncClient, app: FastAPI, two: Two
) -> None:
    count = 0
    for method, route in routes(app, "/v1/admin"):
        path = str(route.path_format).format(**dict.fromkeys(named_in(app, route, method, "path"), "n"))
        answer = await client.request(method, path, **body_of(app, route, method), headers=two.stranger)
        code = answer.json()["error"]["code"]
        assert (answer.status_code, code) == (403, "forbidden"), f"{method} {route.path}: {answer.text}"
        count += 1
    assert count > 15


async def test_nothing_is_told_without_a_key(client: httpx.AsyncClient, app: FastAPI) -> None:
    del client.headers["Authorization"]
    for method, route in routes(app, "/"):
        if route.path in OPEN:
            continue
        path = str(route.path_format).format(**dict.fromkeys(named_in(app, route, method, "path"), "1"))
        answer = await client.request(method, path, content=b"{no json")
        assert answer.status_code == 401, f"{method} {route.path} answers {answer.status_code} without a key"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for odd in ("Bearer no-such-key", "Basic dXNlcjpwYXNz", "Bearer ", "tk_test", "Bearer \xff"):
        headers = [(b"Authorization", odd.encode("latin-1"))]
        assert (await client.get("/v1/sessions", headers=headers)).status_code == 401
    assert (await client.get("/v1/no-such-route")).status_code == 401
