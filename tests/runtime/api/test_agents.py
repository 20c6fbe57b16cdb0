"""Agents: versions that never change, and sessions that are made of them."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import httpx
import pytest
from fastapi import FastAPI

from runtime.store import Database

COMMAND = {"name": "do", "description": "Do.", "command": ["true"], "env": {"TOKEN": "hunter22"}}
AGENT: dict[str, Any] = {
    "name": "reviewer",
    "description": "Reviews.",
    "system": "You are brief.",
    "tools": ["bash", COMMAND],
    "files": {"a.txt": "a"},
    "limits": {"max_think_tokens": 99, "pids": 77},
    "approvals": {"do": {}},
    "metadata": {"team": "blue"},
}
VERSION = {key: value for key, value in AGENT.items() if key != "name"}


async def made(client: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    answer = await client.post("/v1/agents", json={**AGENT, **changes})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def test_an_agent_has_versions_and_equal_content_is_the_same_one(client: httpx.AsyncClient) -> None:
    agent = await made(client)
    assert (agent["id"], agent["version"], agent["limits"]["pids"]) == ("reviewer", 1, 77)
    assert agent["tools"][1]["env"] == {"TOKEN": "***"}
    same = await client.post("/v1/agents/reviewer/versions", json=VERSION)
    assert (same.status_code, same.json()["id"]) == (200, 1)
    other = {**VERSION, "tools": ["bash", {**COMMAND, "env": {"TOKEN": "hunter23"}}]}
    revised = await client.post("/v1/agents/reviewer/versions", json=other)
    assert (revised.status_code, revised.json()["id"]) == (201, 2)
    back = await client.post("/v1/agents/reviewer/versions", json=VERSION)
    assert (back.status_code, back.json()["id"]) == (201, 3)
    page = (await client.get("/v1/agents/reviewer/versions", params={"limit": 2})).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([3, 2], True)
    rest = (await client.get("/v1/agents/reviewer/versions", params={"after": page["last_id"]})).json()
    assert [one["id"] for one in rest["data"]] == [1]
    assert (await client.get("/v1/agents/reviewer/versions/1")).json()["description"] == "Reviews."
    assert (await client.get("/v1/agents/reviewer/versions/4")).status_code == 404
    assert [(one["id"], one["version"]) for one in (await client.get("/v1/agents")).json()["data"]] == [("reviewer", 3)]


async def test_a_name_is_taken_once_and_a_repeated_request_is_answered_as_the_first(client: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "once"}
    for _ in range(2):
        answer = await client.post("/v1/agents", json=AGENT, headers=headers)
        assert (answer.status_code, answer.json()["version"]) == (201, 1)
    assert (await client.post("/v1/agents", json=AGENT)).status_code == 409
    both = await asyncio.gather(*(client.post("/v1/agents", json={**AGENT, "name": "b"}) for _ in range(4)))
    assert sorted(one.status_code for one in both) == [201, 409, 409, 409]
    revised = await asyncio.gather(
        *(client.post("/v1/agents/b/versions", json={**VERSION, "system": str(n)}) for n in range(4))
    )
    assert sorted(one.json()["id"] for one in revised) == [2, 3, 4, 5]


async def test_a_version_cannot_be_changed_in_the_record(app: FastAPI, client: httpx.AsyncClient) -> None:
    await made(client)
    db: Database = app.state.db
    with pytest.raises(asyncpg.CheckViolationError, match="immutable"):
        await db.execute("UPDATE agent_versions SET description = 'x'")


async def test_a_session_is_made_of_a_version_and_stays_as_it_was(client: httpx.AsyncClient) -> None:
    await made(client)
    first = (await client.post("/v1/sessions", json={"agent": "reviewer"})).json()
    await client.post("/v1/agents/reviewer/versions", json={**VERSION, "system": "You are long."})
    second = (await client.post("/v1/sessions", json={"agent": "reviewer", "metadata": {"run": "2"}})).json()
    pinned = (await client.post("/v1/sessions", json={"agent": "reviewer@1"})).json()
    again = (await client.get(f"/v1/sessions/{first['id']}")).json()
    assert [one["agent"]["version"] for one in (first, second, pinned, again)] == [1, 2, 1, 1]
    assert [one["system"] for one in (again, second)] == ["You are brief.", "You are long."]
    assert (first["limits"]["max_think_tokens"], first["approvals"]) == (99, {"do": {"deadline_s": None}})
    assert second["metadata"] == {"team": "blue", "run": "2"}
    found = {}
    for asked in ("reviewer", "reviewer@1", "reviewer@2", "nobody"):
        found[asked] = len((await client.get("/v1/sessions", params={"agent": asked})).json()["data"])
    assert found == {"reviewer": 3, "reviewer@1": 2, "reviewer@2": 1, "nobody": 0}
    idle = await client.get("/v1/sessions", params={"state": ["idle", "paused"]})
    created = await client.get("/v1/sessions", params=[("state", "created"), ("state", "idle")])
    assert (len(idle.json()["data"]), len(created.json()["data"])) == (0, 3)


async def test_what_is_said_for_a_session_wins_member_by_member(client: httpx.AsyncClient) -> None:
    await made(client)
    body = {
        "agent": "reviewer",
        "system": None,
        "limits": {"pids": 88},
        "approvals": {"bash": {"deadline_s": 5}},
        "files": {"b.txt": "b"},
        "sampling": {"temperature": 0.5},
    }
    session = (await client.post("/v1/sessions", json=body)).json()
    assert session["system"] is None
    assert (session["limits"]["pids"], session["limits"]["max_think_tokens"]) == (88, 99)
    assert set(session["approvals"]) == {"do", "bash"}
    assert (session["sampling"]["temperature"], session["sampling"]["top_p"]) == (0.5, 1.0)
    refused = await client.post("/v1/sessions", json={"agent": "reviewer", "tools": ["bash"]})
    assert refused.status_code == 400
    assert "with the agent reviewer@1" in refused.json()["error"]["message"]
    assert "'do' is no tool" in refused.json()["error"]["message"]


async def test_an_archived_agent_makes_no_sessions_and_those_that_there_are_stay(client: httpx.AsyncClient) -> None:
    await made(client)
    session = (await client.post("/v1/sessions", json={"agent": "reviewer"})).json()
    for _ in range(2):
        archived = await client.post("/v1/agents/reviewer/archive")
        assert archived.json()["archived_at"] is not None
    refused = await client.post("/v1/sessions", json={"agent": "reviewer@1"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "agent_archived")
    assert (await client.get(f"/v1/sessions/{session['id']}")).status_code == 200
    assert (await client.post("/v1/agents/reviewer/versions", json={"system": "x"})).status_code == 409
    assert (await client.get("/v1/agents")).json()["data"] == []
    assert len((await client.get("/v1/agents", params={"archived": "true"})).json()["data"]) == 1


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"name": "a b"}, "invalid_request"),
        ({"name": "a@1"}, "invalid_request"),
        ({"name": "x", "model": "no such model"}, "model_not_found"),
        ({"name": "x", "tools": [{**COMMAND, "env": {"A": {"secret": "NONE"}}}]}, "secret_not_found"),
        ({"name": "x", "image": "busybox"}, "image_not_allowed"),
        ({"name": "x", "egress": ["example.org"]}, "host_not_allowed"),
        ({"name": "x", "files": {"../a": "x"}}, "invalid_request"),
        ({"name": "x", "system": "word " * 9000}, "context_length_exceeded"),
        ({"name": "x", "metadata": {str(n): "" for n in range(17)}}, "invalid_request"),
        ({"name": "x", "seed": 1}, "invalid_request"),
    ],
)
async def test_what_no_session_could_be_made_of_is_refused(
    client: httpx.AsyncClient, body: dict[str, Any], code: str
) -> None:
    answer = await client.post("/v1/agents", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert (await client.get("/v1/agents")).json()["data"] == []


@pytest.mark.parametrize("agent", ["nobody", "nobody@1", "a b", "a@0", "a@x", "@1", "a@99999999999"])
async def test_an_agent_that_is_not_there_is_refused(client: httpx.AsyncClient, agent: str) -> None:
    assert (await client.post("/v1/sessions", json={"agent": agent})).status_code == 400
