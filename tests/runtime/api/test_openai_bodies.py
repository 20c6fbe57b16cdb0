"""What OpenAI's clients may send by mistake is refused by its name, and leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from runtime.api import following
from runtime.store import Database, responses, sessions
from runtime.tools.egress import Egress
from sandbox.allow import parse_allow

USER = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Deliveries that nobody here takes are given up with an error that nobody asks for: not while Python is parsed,
    which CPython 3.11 cannot bear."""
    yield
    gc.collect()


def function(**more: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, **more}


def server(**more: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "a", "server_url": "http://x", **more}


def ours(allowed: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "tenuto", "allowed_tools": allowed}


TOOLS: list[tuple[list[Any], str]] = [
    ([function(name="a b")], "tools.0.name"),
    ([function(name="x" * 500)], "tools.0.name"),
    ([function(), function()], "tools"),
    ([function(name="bash")], "tools"),
    ([function(parameters=[1])], "tools[0].parameters"),
    ([function(parameters={"type": "strange"})], "tools.0.parameters"),
    ([function(parameters={"type": "object", "properties": 5})], "tools"),
    ([ours(5)], "tools[0].allowed_tools"),
    ([ours([["bash"]])], "tools[0].allowed_tools"),
    ([ours(["none"])], "tools[0].allowed_tools"),
    ([ours(["bash", "bash"])], "tools"),
    ([server(server_url=5)], "tools.0.url"),
    ([server(server_url="file:///etc/passwd")], "tools.0.url"),
    ([server(headers="abc")], "tools[0].headers"),
    ([server(headers={"a": 5})], "tools.0.headers.a.literal"),
    ([server(server_label="a b/")], "tools.0.name"),
    ([server(require_approval={"always": {}})], "tools[0].require_approval"),
]
INPUTS: list[tuple[list[Any], str]] = [
    ([5], "input"),
    ([{"type": {}}], "input[0].type"),
    ([{"role": ["user"], "content": "x"}], "input[0].role"),
    ([{**CALL, "arguments": "{"}, OUTPUT], "input[0].arguments"),
    ([{**CALL, "arguments": '{"a": NaN}'}, OUTPUT], "input[0].arguments"),
    ([{**CALL, "arguments": "[" * 5000}, OUTPUT], "input[0].arguments"),
    ([{**CALL, "arguments": '{"a": ' + "1" * 6000 + "}"}, OUTPUT], "input[0].arguments"),
    ([{**CALL, "arguments": '{"a": "\\u0000"}'}, OUTPUT], "input"),
    ([{**CALL, "arguments": '{"a": "\\ud800"}'}, OUTPUT], "input"),
    ([{**CALL, "name": "a b"}, OUTPUT], "input.0.called.name"),
    ([CALL, USER], "input"),
    ([OUTPUT], "input"),
    ([{"type": "reasoning", "id": 5}, USER], "input[0].id"),
    ([{"type": "mcp_call", "id": "x", "name": "f", "error": [5]}], "input[0].output"),
    ([{"type": "mcp_approval_request", "id": "x"}], "input[0].name"),
    ([{"type": "mcp_approval_response", "approval_request_id": "x", "approve": "yes"}], "input[0].approve"),
    ([USER, {"type": "mcp_approval_response", "approval_request_id": "x", "approve": True}], "input"),
    ([{"role": "user", "content": "y " * 20_000}], "content"),
]
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": {"type": "function", "name": 5}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "x" * 5000}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "none_such"}}, "tool_choice"),
    ({"text": {"frob": 1}}, "text.frob"),
    ({"previous_response_id": "none"}, "previous_response_id"),
    ({"prompt": {"id": "x"}}, "prompt"),
]
CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": 5, "function": {}}]}]}, "messages[1].call_id"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].call_id"),
    ({"messages": [USER], "logit_bias": {"NaN": 1}}, "logit_bias.NaN.[key]"),
    ({"messages": [USER], "logit_bias": {"5": 500}}, "logit_bias.5"),
    ({"messages": [USER], "prompt_cache_retention": "x"}, "prompt_cache_retention"),
    ({"messages": [USER], "function_call": "auto"}, None),
]


async def test_what_cannot_be_told_a_session_is_refused_by_name_and_leaves_none(
    client: httpx.AsyncClient, subtests: Any
) -> None:
    bodies: list[tuple[str, dict[str, Any], str | None]] = [
        *(("responses", {"input": "x", "tools": tools}, param) for tools, param in TOOLS),
        *(("responses", {"input": items}, param) for items, param in INPUTS),
        *(("responses", {"input": "x", **more}, param) for more, param in OTHERS),
        *(("chat/completions", body, param) for body, param in CHATS),
    ]
    for path, body, param in bodies:
        with subtests.test(path=path, body=str(body)[:200]):
            answer = await client.post(f"/v1/{path}", json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param, answer.text
    assert (await client.get("/v1/sessions")).json()["data"] == []


async def begun(client: httpx.AsyncClient, headers: Any = None, **more: Any) -> dict[str, Any]:
    """In the background, since nobody is here to answer."""
    body = {"input": "x", "background": True, **more}
    answer = await client.post("/v1/responses", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_request_with_an_idempotency_key_makes_one_response_however_often_it_comes(
    client: httpx.AsyncClient,
) -> None:
    made = [await begun(client, {"Idempotency-Key": "k"}) for _ in range(3)]
    assert len({one["id"] for one in made}) == 1
    assert len((await client.get("/v1/sessions")).json()["data"]) == 1
    other = await client.post("/v1/responses", json={"input": "y"}, headers={"Idempotency-Key": "k"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_mismatch")


async def test_each_try_again_is_given_the_first_response_once(client: httpx.AsyncClient) -> None:
    first = await begun(client)
    tries = [(await begun(client, {"x-stainless-retry-count": count}))["id"] for count in ("1", "2")]
    assert tries == [first["id"]] * 2
    odd = [(await begun(client, {"x-stainless-retry-count": count}))["id"] for count in ("1", "0x2", "-1", "9" * 5000)]
    assert len({first["id"], *odd}) == 5


async def test_what_a_server_is_told_in_secret_is_neither_repeated_nor_kept(
    client: httpx.AsyncClient, app: FastAPI
) -> None:
    tool = server(server_url="http://mcp.example.org", headers={"X-Key": "hunter2"}, authorization="hunter2")
    app.state.egress = Egress(parse_allow("*.example.org"))
    made = await begun(client, tools=[tool])
    assert made["tools"] == [{name: tool[name] for name in ("type", "server_label", "server_url")}]
    rows = await app.state.db.fetch("SELECT responses::text AS kept FROM responses")
    rows += await app.state.db.fetch("SELECT sessions::text AS kept FROM sessions")
    assert len(rows) == 2
    assert all("hunter2" not in row["kept"] for row in rows)


async def test_a_conversation_keeps_what_was_asked_and_answered_and_may_be_deleted_at_any_time(
    client: httpx.AsyncClient, app: FastAPI
) -> None:
    asks = {"type": "mcp_approval_request", "id": "q", "name": "bash", "server_label": "tenuto", "arguments": "{}"}
    gave = {"type": "mcp_approval_response", "approval_request_id": "q", "approve": False}
    thought = {"type": "reasoning", "id": "r", "summary": []}
    items = [USER, asks, gave, thought, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]
    made = (await client.post("/v1/conversations", json={"items": items})).json()
    path = f"/v1/conversations/{made['id']}"
    listed = (await client.get(f"{path}/items", params={"order": "asc"})).json()["data"]
    assert [item["type"] for item in listed] == ["message", *(item["type"] for item in items[1:4]), "message"]
    for item in listed:
        assert (await client.get(f"{path}/items/{item['id']}")).json() == item
    response = await begun(client, conversation=made["id"])
    busy = await client.post("/v1/responses", json={"input": "y", "conversation": made["id"]})
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "conversation_busy")
    assert (await client.delete(path)).status_code == 200
    row = await responses.get(app.state.db, "default", response["id"])
    assert row.conversation_id is None
    await responses.finish(  # by somebody who read it before that
        app.state.db,
        replace(row, conversation_id=made["id"]),
        end_pos=9,
        end_step=2,
        kept=[],
        response=ended(response),
        digest="d",
    )
    assert (await client.get(f"/v1/responses/{response['id']}")).json()["status"] == "completed"


def ended(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "status": "completed"}


async def test_sessions_end_with_the_last_response_that_needs_them(client: httpx.AsyncClient, app: FastAPI) -> None:
    db: Database = app.state.db
    made = await begun(client, prompt_cache_retention="in_memory")
    kept = await begun(client, prompt_cache_retention="24h")
    await age(db, timedelta(hours=2))
    assert [one for _, one in await responses.expired_sessions(db)] == [made["runtime"]["session"]]
    await age(db, timedelta(hours=23))
    expired = {one for _, one in await responses.expired_sessions(db)}
    assert expired == {made["runtime"]["session"], kept["runtime"]["session"]}
    for session in expired:
        await sessions.request_end(db, "default", session)
    assert await responses.expired_sessions(db) == []
    states = [one["state"] for one in (await client.get("/v1/sessions")).json()["data"]]
    assert set(states) <= {"cancelling", "cancelled"}


async def age(db: Database, by: timedelta) -> None:
    await db.execute(
        "UPDATE responses SET created_at = created_at - $1::interval, expires_at = expires_at - $1::interval", by
    )


async def test_a_response_that_never_reached_its_session_is_forgotten_and_others_are_taken_over(
    client: httpx.AsyncClient, app: FastAPI
) -> None:
    db: Database = app.state.db
    kept, lost = await begun(client), await begun(client)
    await db.execute("UPDATE responses SET message_id = 'msg_none' WHERE response_id = $1", lost["id"])
    await age(db, timedelta(minutes=1))
    app.state.followed.clear()
    for row in await responses.unfinished(db, following.STALE_S):
        await following.take_over(app, db, row)
    assert app.state.followed == {kept["id"]}
    assert (await client.get(f"/v1/responses/{lost['id']}")).status_code == 404


@pytest.mark.parametrize("path", ["", "/input_items", "?stream=true"])
async def test_a_response_of_another_tenant_is_none(client: httpx.AsyncClient, app: FastAPI, path: str) -> None:
    made = await begun(client)
    await client.post("/v1/admin/tenants", json={"id": "stranger"})
    key = (await client.post("/v1/admin/keys", json={"tenant": "stranger", "scope": "use"})).json()["key"]
    headers = {"Authorization": f"Bearer {key}"}
    assert (await client.get(f"/v1/responses/{made['id']}{path}", headers=headers)).status_code == 404
    body = {"input": "y", "previous_response_id": made["id"], "background": True}
    answer = await client.post("/v1/responses", json=body, headers=headers)
    assert answer.json()["error"]["code"] == "previous_response_not_found"
