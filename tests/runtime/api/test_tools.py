"""Tools at the API: what a session may not be made with, what is not shown, and outputs as bytes."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from runtime.store import Database
from runtime.tools.egress import Egress
from sandbox.allow import parse_allow

HTTP = {"type": "http", "name": "ask", "description": "Ask.", "url": "https://api.example.org/x"}
MCP = {"type": "mcp", "name": "far", "url": "https://mcp.example.org/mcp"}


@pytest.mark.parametrize("tool", [HTTP, MCP])
async def test_a_tool_whose_host_is_not_listed_is_refused_before_anything_is_created(
    client: httpx.AsyncClient, tool: dict[str, object]
) -> None:
    answer = await client.post("/v1/sessions", json={"tools": [tool]})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("tools", "host_not_allowed")
    assert str(tool["name"]) in error["message"]
    assert "TENUTO_EGRESS_ALLOW" in error["message"]
    assert (await client.get("/v1/sessions")).json()["data"] == []


@pytest.mark.parametrize("egress", ["a.example.org", "*.example.org:443", "b.example.org:80", "*.org:443"])
async def test_a_sandbox_is_opened_only_within_what_the_operator_allows(
    app: FastAPI, client: httpx.AsyncClient, egress: str
) -> None:
    answer = await client.post("/v1/sessions", json={"egress": [egress]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("egress", "host_not_allowed")
    assert "TENUTO_SANDBOX_EGRESS_ALLOW" in error["message"]
    app.state.sandbox_egress = parse_allow("*.example.org:443,b.example.org")
    inside = egress in ("*.example.org:443", "b.example.org:80")
    made = await client.post("/v1/sessions", json={"egress": [egress]})
    assert made.status_code == (201 if inside else 400)
    if inside:
        assert made.json()["egress"] == [egress]


@pytest.mark.parametrize("tool", [HTTP, MCP])
@pytest.mark.parametrize(
    "url",
    ["http://a.example.org/\t", "http://a.example.org/\x01", "http://[v1.x]/", "http://xn--a\u200b.org/", "http:///x"],
)
async def test_an_address_that_no_client_understands_is_refused(
    client: httpx.AsyncClient, tool: dict[str, object], url: str
) -> None:
    answer = await client.post("/v1/sessions", json={"tools": [{**tool, "url": url}]})
    assert answer.status_code == 400
    assert "must be an http:// or https:// address" in answer.json()["error"]["message"]


async def test_headers_and_environments_are_not_shown(app: FastAPI, client: httpx.AsyncClient) -> None:
    app.state.egress = Egress(parse_allow("*.example.org"))
    tools = [
        {**HTTP, "headers": {"Authorization": "Bearer hunter22"}},
        {**MCP, "headers": {"X-Key": "hunter22"}},
        {"name": "do", "description": "Do.", "command": ["true"], "env": {"TOKEN": "hunter22"}},
    ]
    made = await client.post("/v1/sessions", json={"tools": tools})
    assert made.status_code == 201, made.text
    session = made.json()["id"]
    assert made.json()["tools"][0]["headers"] == {"Authorization": "***"}
    for path in ("", f"/{session}", f"/{session}/events"):
        assert "hunter22" not in (await client.get(f"/v1/sessions{path}")).text


async def test_a_refused_tool_does_not_repeat_its_secret(client: httpx.AsyncClient) -> None:
    tool = {**HTTP, "headers": {"Authorization": "hunter22\nX: y"}}
    answer = await client.post("/v1/sessions", json={"tools": [tool]})
    assert answer.status_code == 400
    assert "hunter22" not in answer.text


async def test_a_choice_may_name_a_tool_that_a_server_is_yet_to_list(app: FastAPI, client: httpx.AsyncClient) -> None:
    app.state.egress = Egress(parse_allow("*.example.org"))
    session = (await client.post("/v1/sessions", json={"tools": [MCP]})).json()["id"]
    for choice, status in (("far__search", 202), ("near__search", 400)):
        body = {"content": "Go.", "tool_choice": choice}
        assert (await client.post(f"/v1/sessions/{session}/events", json=body)).status_code == status


async def _settled(db: Database, session: str, step: int) -> None:
    await db.execute(
        "INSERT INTO steps (session_id, step_no, tenant_id, kind, state, token_start)"
        " SELECT session_id, $2, tenant_id, 'tool', 'completed', 0 FROM sessions WHERE session_id = $1",
        *(session, step),
    )
    await db.execute(
        "INSERT INTO tool_calls (session_id, step_no, call_no, tenant_id, name, arguments, argument_digest, effect,"
        " status, fence, owner, lease_until, snapshot_before, result, output)"
        " SELECT session_id, $2, 0, tenant_id, 'do', '{}', '', 'pure', 'settled', 1, 'n', now(), '', '{}', $3"
        " FROM sessions WHERE session_id = $1",
        *(session, step, b"a\x00\xff\r\n"),
    )


async def test_an_output_comes_as_the_bytes_that_were_kept(app: FastAPI, client: httpx.AsyncClient) -> None:
    session = (await client.post("/v1/sessions", json={})).json()["id"]
    db: Database = app.state.db
    await _settled(db, session, 3)
    answer = await client.get(f"/v1/sessions/{session}/steps/3/calls/0/output")
    assert (answer.status_code, answer.content) == (200, b"a\x00\xff\r\n")
    assert answer.headers["content-type"] == "application/octet-stream"
    for missing in ("steps/3/calls/1", "steps/2/calls/0"):
        assert (await client.get(f"/v1/sessions/{session}/{missing}/output")).status_code == 404
    assert (await client.get(f"/v1/sessions/{session}/steps/-1/calls/0/output")).status_code == 400
    assert (await client.get("/v1/sessions/ses_other/steps/3/calls/0/output")).status_code == 404


async def test_a_fork_has_the_outputs_of_the_steps_that_it_began_with(app: FastAPI, client: httpx.AsyncClient) -> None:
    db: Database = app.state.db
    sessions = [(await client.post("/v1/sessions", json={})).json()["id"] for _ in range(4)]
    for name, parent, step, call in (
        (sessions[1], sessions[0], 3, None),
        (sessions[2], sessions[1], 4, None),
        (sessions[3], sessions[0], 3, 0),  # a child that a tool runs, not a fork
    ):
        await db.execute(
            "UPDATE sessions SET parent_id = $2, parent_step = $3, parent_call = $4 WHERE session_id = $1",
            *(name, parent, step, call),
        )
    for step in (3, 5):
        await _settled(db, sessions[0], step)
    status = {
        (name, step): (await client.get(f"/v1/sessions/{name}/steps/{step}/calls/0/output")).status_code
        for name in sessions
        for step in (3, 5)
    }
    assert {key for key, found in status.items() if found == 200} == {
        *((sessions[0], step) for step in (3, 5)),
        *((name, 3) for name in sessions[1:3]),
    }
