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
from tests.runtime.api.test_keys import bearer, make

MARK = "hunter22"  # stands in everything that the other tenant wrote
# What a path's parameters name, all of it the other tenant's. A route with a new one belongs here before it is merged.
THINGS: dict[str, Any] = {
    "session_id": "",
    "question_id": "",
    "step": 3,
    "call": 0,
    "path": "a.txt",
    "change_id": "cmd_write",
    "exec_id": "cmd_exec",
    "intent": "pin",
}
# What is nobody's own: models are the installation's, for every tenant.
SHARED = {"model"}
# Routes that need more than an empty body to get as far as looking for the thing.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/sessions/{session_id}/events": {"content": "hi"},
    "/v1/sessions/{session_id}/rewind": {"step": 1},
    "/v1/sessions/{session_id}/sandbox/exec": {"command": "true"},
    "/v1/approvals/{question_id}": {"decision": "approve"},
}
# Query parameters that name a thing, where one could look through them at what is the other tenant's.
NAMING = ("after", "session")
OPEN = ("/healthz", "/readyz")


@dataclass
class Two:
    """The one whose things they are, and the one who asks for them."""

    owner: dict[str, str]
    stranger: dict[str, str]
    things: dict[str, Any]


@pytest.fixture
async def two(client: httpx.AsyncClient, app: FastAPI) -> Two:
    keys = {}
    for name in ("acme", "stranger"):
        await client.post("/v1/admin/tenants", json={"id": name})
        keys[name] = bearer((await make(client, tenant=name))["key"])
    session = await client.post("/v1/sessions", json={"system": MARK, "files": {"a.txt": MARK}}, headers=keys["acme"])
    things = {**THINGS, "session_id": session.json()["id"], "question_id": "qst_1"}
    await _fill(app.state.db, things)
    await client.post(f"/v1/sessions/{things['session_id']}/events", json={"content": MARK}, headers=keys["acme"])
    return Two(keys["acme"], keys["stranger"], things)


async def _fill(db: Database, things: dict[str, Any]) -> None:
    """A step, a call's output and a question, which no node is here to make."""
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
    for command_id, verb in ((things["change_id"], "write"), (things["exec_id"], "exec")):
        await db.execute(
            "INSERT INTO commands (command_id, tenant_id, session_id, verb, argument, state, result, output)"
            " VALUES ($1, 'acme', $2, $3, '{}', 'done', '{\"step\": 1}', $4)",
            command_id,
            things["session_id"],
            verb,
            MARK.encode(),
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


def body_of(app: FastAPI, route: RouteContext, method: str) -> dict[str, Any] | None:
    """What the document gives as an example of the route's body."""
    if route.path in BODIES:
        return BODIES[route.path]
    described = app.openapi()["paths"][route.path_format][method.lower()].get("requestBody")
    if described is None or "application/json" not in described["content"]:
        return None
    schema = described["content"]["application/json"]["schema"]
    schema = next((one for one in schema.get("anyOf", ()) if "$ref" in one), schema)
    shape = app.openapi()["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return dict((shape.get("examples") or [{}])[0])


def betrays(text: str, things: dict[str, Any], asked: str) -> bool:
    """Whether an answer says something of the other tenant beyond what was in the question."""
    told = text.replace(asked, "")
    traces = [MARK, "acme", *(value for value in things.values() if isinstance(value, str) and value not in asked)]
    return any(trace in told for trace in traces)


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
        if set(names) <= SHARED or route.path.startswith("/v1/admin"):
            continue
        assert set(names) <= set(two.things), f"{route.path}: say in THINGS what {names} of another tenant is"
        path = route.path_format.format(**two.things)
        answer = await client.request(method, path, json=body_of(app, route, method), headers=two.stranger)
        asked = " ".join(str(two.things[name]) for name in names)
        wrong = answer.status_code != 404 or any(betrays(answer.text, two.things, one) for one in asked.split()[:1])
        assert not wrong, f"{method} {route.path} answers {answer.status_code}: {answer.text}"
        if method == "GET" and not route.path.endswith("/stream"):
            owned = await client.get(path, headers=two.owner)
            assert owned.status_code == 200, f"{route.path} does not know the thing of its owner: {owned.text}"
        seen.append(route.path)
    assert len(seen) > 20


async def test_no_list_has_anything_of_another_tenant_whatever_is_asked_of_it(
    client: httpx.AsyncClient, app: FastAPI, two: Two
) -> None:
    ids = [value for value in two.things.values() if isinstance(value, str)]
    for method, route in routes(app):
        if method != "GET" or named_in(app, route, method, "path") or route.path.startswith("/v1/admin"):
            continue
        plain = await client.get(route.path, headers=two.stranger)
        assert plain.status_code == 200, f"{route.path}: {plain.text}"
        assert not betrays(plain.text, two.things, "\0"), f"{route.path} tells {plain.text}"
        for name in set(NAMING) & set(named_in(app, route, method, "query")):
            for one in ids:
                answer = await client.get(route.path, params={name: one}, headers=two.stranger)
                assert answer.status_code in (200, 400, 404), answer.text
                assert not betrays(answer.text, two.things, one), f"{route.path}?{name}={one} tells {answer.text}"


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
        path = route.path_format.format(**dict.fromkeys(named_in(app, route, method, "path"), "n"))
        answer = await client.request(method, path, json=body_of(app, route, method), headers=two.stranger)
        code = answer.json()["error"]["code"]
        assert (answer.status_code, code) == (403, "forbidden"), f"{method} {route.path}: {answer.text}"
        count += 1
    assert count > 15


async def test_nothing_is_told_without_a_key(client: httpx.AsyncClient, app: FastAPI) -> None:
    del client.headers["Authorization"]
    for method, route in routes(app, "/"):
        if route.path in OPEN:
            continue
        path = route.path_format.format(**dict.fromkeys(named_in(app, route, method, "path"), "1"))
        answer = await client.request(method, path, content=b"{no json")
        assert answer.status_code == 401, f"{method} {route.path} answers {answer.status_code} without a key"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for odd in ("Bearer no-such-key", "Basic dXNlcjpwYXNz", "Bearer ", "tk_test", "Bearer \xff"):
        headers = [(b"Authorization", odd.encode("latin-1"))]
        assert (await client.get("/v1/sessions", headers=headers)).status_code == 401
    assert (await client.get("/v1/no-such-route")).status_code == 401
