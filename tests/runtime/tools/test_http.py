"""Tools that are HTTP requests, through the ledger, against a real server."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from runtime.store import ledger
from tests.runtime.tools.conftest import Node
from tests.runtime.tools.servers import Seen

pytestmark = [pytest.mark.sandbox, pytest.mark.model]


def tool(web: Seen, path: str, **more: Any) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in ("id", "q", "n")}
    parameters = {"type": "object", "properties": properties, "required": ["id"]}
    return {
        "type": "http", "name": "ask", "description": "Ask.", "url": web.url + path, "parameters": parameters, **more
    }  # fmt: skip


def listed(node: Node, web: Seen) -> Node:
    return node.allowing(web.url.removeprefix("http://"))


async def test_arguments_fill_the_url_and_the_rest_is_the_query(node: Node, web: Seen) -> None:
    node = listed(node, web)
    session = await node.session([tool(web, "/items/{id}?fixed=1", headers={"X-Token": "Bearer s3cr3t-t0ken"})])
    [row] = await node.called(session, ("ask", {"id": "a/b ?", "q": "x&y", "n": 3}))
    [asked] = web.requests
    assert (asked["method"], asked["path"]) == ("GET", "/items/a%2Fb%20%3F")
    assert sorted(asked["query"].split("&")) == ["fixed=1", "n=3", "q=x%26y"]
    assert asked["headers"]["X-Token"] == "Bearer s3cr3t-t0ken"
    assert asked["headers"]["Idempotency-Key"] == f"{session}/3/0"
    assert (row["effect"], row["result"]["reason"], row["result"]["code"]) == ("idempotent", "http", 200)
    # The server echoes what it got, and the secret is in it.
    assert b"s3cr3t-t0ken" not in row["output"]
    assert "s3cr3t-t0ken" not in str(await node.events(session))


async def test_a_post_sends_the_rest_as_json_and_says_nothing_of_idempotency(node: Node, web: Seen) -> None:
    node = listed(node, web)
    session = await node.session([tool(web, "/items/{id}", method="POST")])
    [row] = await node.called(session, ("ask", {"id": "7", "q": "é"}))
    [asked] = web.requests
    assert json.loads(asked["body"]) == {"q": "é"}
    assert "Idempotency-Key" not in asked["headers"]
    assert row["effect"] == "unsafe"


async def test_a_host_that_is_not_listed_is_refused_before_anything_begins(node: Node, web: Seen) -> None:
    session = await node.session([tool(web, "/")])
    [row] = await node.called(session, ("ask", {"id": "1"}))
    assert web.requests == []
    assert (row["result"]["reason"], row["runs"]) == ("refused", 0)
    assert b"TENUTO_EGRESS_ALLOW" in row["output"]
    [settled] = await node.events(session, "tool.settled")
    assert settled["reason"] == "refused"
    assert await node.events(session, "tool.started") == []


async def test_a_loopback_address_is_refused_where_only_its_host_is_listed(node: Node, web: Seen) -> None:
    node = node.allowing("127.0.0.1")
    session = await node.session([tool(web, "/")])
    [row] = await node.called(session, ("ask", {"id": "1"}))
    assert (row["result"]["reason"], web.requests) == ("refused", [])


async def test_a_placeholder_cannot_climb_and_cannot_be_missing(node: Node, web: Seen) -> None:
    node = listed(node, web)
    session = await node.session([tool(web, "/items/{id}")])
    rows = await node.called(session, ("ask", {"id": ".."}), ("ask", {"q": "x"}))
    assert [row["result"]["reason"] for row in rows] == ["refused", "refused"]
    assert web.requests == []


async def test_a_redirect_is_followed_within_the_list_and_takes_no_headers_along(node: Node, web: Seen) -> None:
    node = listed(node, web)
    there = f"/to?url={web.url.replace('127.0.0.1', 'localhost')}/end"
    for allow, reason in (("", "refused"), (f",localhost:{web.url.rpartition(':')[2]}", "http")):
        web.requests.clear()
        some = node.allowing(web.url.removeprefix("http://") + allow)
        session = await some.session([tool(web, there, headers={"X-Token": "s3cr3t-t0ken"})])
        [row] = await some.called(session, ("ask", {}))
        assert row["result"]["reason"] == reason
        assert len(web.requests) == 1 + (reason == "http")
    assert web.requests[1]["path"] == "/end"
    assert "X-Token" not in web.requests[1]["headers"]


@pytest.mark.parametrize("size", [5_000_000, 100_000_000])
async def test_a_large_answer_is_cut_where_it_comes_in(node: Node, web: Seen, size: int) -> None:
    node = listed(node, web)
    session = await node.session([tool(web, f"/big/{size}")], limits={"tool_output_bytes": 4096})
    [row] = await node.called(session, ("ask", {}))
    assert row["output"] == b"x" * 4096 + f"\n[... {size - 4096} bytes left out ...]\n".encode()
    assert row["result"]["truncated"]


async def test_bytes_are_kept_as_they_are_and_the_model_is_told_what_they_are(node: Node, web: Seen) -> None:
    node = listed(node, web)
    picture, odd = tool(web, "/image"), {**tool(web, "/invalid"), "name": "odd"}
    session = await node.session([picture, odd])
    rows = await node.called(session, ("ask", {}), ("odd", {}))
    assert [row["output"] for row in rows] == [bytes(range(256)), b"a\xff\xfe\x00b"]
    told = await node.db.fetchrow("SELECT token_ids FROM segments WHERE session_id = $1 AND kind = 'tool'", session)
    assert told is not None
    assert "[image/png, 256 bytes]" in node.services.tokenizer.decode(told["token_ids"])


async def test_a_status_an_unreachable_host_and_a_timeout_are_told_apart(node: Node, web: Seen) -> None:
    node = node.allowing(f"{web.url.removeprefix('http://')},127.0.0.1:1")
    names = ("missing", "nobody", "late")
    urls = (f"{web.url}/status/404", "http://127.0.0.1:1/", f"{web.url}/hang")
    tools = [
        {"type": "http", "name": name, "description": "d", "url": url, "timeout_s": 0.5}
        for name, url in zip(names, urls, strict=True)
    ]
    session = await node.session(tools)
    rows = await node.called(session, *((name, {}) for name in names))
    assert [(row["result"]["reason"], row["result"]["code"]) for row in rows] == [
        ("http", 404),
        ("unreachable", None),
        ("timeout", None),
    ]


async def test_calls_that_leave_the_workspace_alone_run_at_the_same_time_and_keep_their_order(
    node: Node, web: Seen
) -> None:
    """Each of the three waits in the server until all of them are there; a file is read meanwhile."""
    node = listed(node, web)
    web.together = threading.Barrier(3)
    session = await node.session([tool(web, "/wait"), "read_file", "write_file"], files={"f": "tide"})
    asked = [("ask", {"id": str(number)}) for number in range(3)]
    rows = await node.called(
        session,
        ("write_file", {"path": "f", "content": "ebb"}),
        *asked,
        ("read_file", {"path": "f"}),
        ("write_file", {"path": "f", "content": "flood"}),
        ("read_file", {"path": "f"}),
    )
    assert [json.loads(row["output"])["query"] for row in rows[1:4]] == ["id=0", "id=1", "id=2"]
    assert (rows[4]["output"], rows[6]["output"]) == (b"ebb", b"flood")
    assert [row["snapshot_before"] == row["snapshot_after"] for row in rows] == [False, *[True] * 4, False, True]
    assert rows[5]["snapshot_before"] == rows[0]["snapshot_after"]


@pytest.mark.parametrize(("method", "runs"), [("GET", 2), ("POST", 1)])
async def test_after_a_crash_only_what_may_be_asked_again_is_asked_again(
    node: Node, web: Seen, monkeypatch: pytest.MonkeyPatch, method: str, runs: int
) -> None:
    node = listed(node, web)
    session = await node.session([tool(web, "/x", method=method), {**tool(web, "/y"), "name": "beside"}])
    owner = await node.take(session)
    await node.think(owner, ("ask", {}), ("beside", {}))
    settle = ledger.settle

    async def died(db: Any, owner: Any, attempt: Any, call: ledger.Call, *rest: Any) -> None:
        if call.call_no == 0:
            raise ConnectionError("the node is gone")
        await settle(db, owner, attempt, call, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "settle", died)
        with pytest.raises(ConnectionError):
            await node.run(owner)
    other = node.again()
    owner = await other.place(session)
    await other.run(owner)
    asked = [each for each in web.requests if each["path"] == "/x"]
    assert len(asked) == runs
    assert len({each["headers"].get("Idempotency-Key") for each in asked}) == 1
    assert sum(each["path"] == "/y" for each in web.requests) == 1
    rows = await node.ledger(session)
    assert [row["status"] for row in rows] == [("settled" if method == "GET" else "outcome_unknown"), "settled"]
    assert [row["runs"] for row in rows] == [runs, 1]
    session_row = await node.db.fetchrow("SELECT waiting_for FROM sessions WHERE session_id = $1", session)
    assert session_row is not None
    assert session_row["waiting_for"] == (None if method == "GET" else "outcome")


async def test_cancel_lets_go_of_a_request(node: Node, web: Seen) -> None:
    node = listed(node, web)
    session = await node.session([tool(web, "/hang")])
    owner = await node.take(session)
    await node.think(owner, ("ask", {}))
    running = asyncio.create_task(node.run(owner))
    while not web.requests:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
