"""MCP servers that run in the sandbox, written with the official library."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from runtime.config import SessionConfig
from runtime.errors import InvalidRequest
from runtime.steps import Steps
from runtime.steps.listing import catalog
from runtime.store import branches, fleet, ledger, sandboxes, sessions
from sandbox import Handle
from tests.runtime.tools.conftest import STDIO, Node
from workflows.contract import InputIn, StepIn

pytestmark = [pytest.mark.sandbox, pytest.mark.model]


async def test_a_server_s_tools_are_asked_for_once_and_called_under_its_name(node: Node) -> None:
    session = await node.session([STDIO])
    rows = await node.called(session, ("counting__add", {"a": 2, "b": 3}), ("counting__picture", {}))
    assert [row["output"] for row in rows] == [b"2 + 3 = 5", b"[image/png, 300 bytes]"]
    assert {row["effect"] for row in rows} == {"sandboxed"}
    [listed] = await node.events(session, "tools.listed")
    assert "counting__add" in listed["tools"]
    assert [left["name"] for left in listed["left_out"]] == ["no name."]
    opening = await node.db.fetchrow("SELECT token_ids FROM segments WHERE session_id = $1 AND idx = 0", session)
    assert opening is not None
    assert "counting__again" in node.services.tokenizer.decode(opening["token_ids"])


async def test_a_server_lives_on_between_steps_and_nodes_and_is_greeted_once(node: Node) -> None:
    session = await node.session([STDIO])
    await node.called(session, ("counting__again", {"word": "a"}), ("counting__again", {"word": "b"}))
    other = node.again()
    owner = await other.place(session)
    await other.think(owner, ("counting__again", {"word": "c"}), step=4)
    await other.run(owner, step=5)
    assert [row["output"] for row in await node.ledger(session)] == [b"a 1", b"b 2", b"c 3"]
    sandbox = await other.sandbox(owner)
    assert await sandbox.get("counted") == b"a\nb\nc\n"
    await sandbox.close()


@pytest.mark.parametrize("effect", ["sandboxed", "unsafe"])
async def test_a_call_whose_record_was_lost_is_found_again_and_not_made_twice(
    node: Node, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    session = await node.session([{**STDIO, "effect": effect}])
    owner = await node.take(session)
    await node.think(owner, ("counting__again", {"word": "once"}))

    async def died(*_: Any) -> None:
        raise ConnectionError("the node is gone")

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "settle", died)
        with pytest.raises(ConnectionError):
            await node.run(owner)
    other = node.again()
    owner = await other.place(session)
    await other.run(owner)
    [row] = await node.ledger(session)
    assert (row["output"], row["runs"], row["status"]) == (b"once 1", 1, "settled")
    sandbox = await other.sandbox(owner)
    assert await sandbox.get("counted") == b"once\n"
    await sandbox.close()


async def test_a_call_is_made_again_in_a_new_sandbox_only_where_a_snapshot_undid_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for effect in ("sandboxed", "unsafe"):
        session = await node.session([{**STDIO, "effect": effect}])
        owner = await node.take(session)
        await node.think(owner, ("counting__again", {"word": "once"}))

        async def died(*_: Any) -> None:
            raise ConnectionError("the node is gone")

        with monkeypatch.context() as patch:
            patch.setattr(ledger, "settle", died)
            with pytest.raises(ConnectionError):
                await node.run(owner)
        row = await sandboxes.of_session(node.db, session)
        assert row is not None
        await node.services.driver.release(Handle.from_json(row["handle"]))
        await node.run(owner)
        [call] = await node.ledger(session)
        expected = ("outcome_unknown", None) if effect == "unsafe" else ("settled", b"once 1")
        assert (call["status"], call["output"]) == expected


async def test_a_server_that_ends_is_told_of_with_its_last_words_and_started_again(node: Node) -> None:
    session = await node.session([STDIO])
    rows = await node.called(session, ("counting__die", {}), ("counting__again", {"word": "new"}))
    assert rows[0]["result"]["reason"] == "server_ended"
    assert b"last words" in rows[0]["output"]
    assert b"exit 7" in rows[0]["output"]
    assert rows[1]["output"] == b"new 1"


async def test_a_call_that_takes_too_long_ends_its_server_and_the_next_one_starts_it_anew(node: Node) -> None:
    session = await node.session([{**STDIO, "timeout_s": 6.0}])
    rows = await node.called(session, ("counting__hang", {}), ("counting__add", {"a": 1, "b": 1}))
    assert rows[0]["result"]["reason"] == "timeout"
    assert rows[1]["output"] == b"1 + 1 = 2"


async def test_a_long_answer_is_cut_with_a_marker_and_one_beyond_all_measure_is_refused(node: Node) -> None:
    session = await node.session([STDIO], limits={"tool_output_bytes": 1000})
    rows = await node.called(
        session, ("counting__long", {"characters": 5000}), ("counting__long", {"characters": 5_000_000})
    )
    assert rows[0]["output"] == b"x" * 1000 + b"\n[... 4000 bytes left out ...]\n"
    assert rows[0]["result"]["truncated"]
    assert rows[1]["result"]["reason"] == "error"
    assert b"says more than" in rows[1]["output"]


async def test_a_wrong_call_is_the_server_s_to_refuse(node: Node) -> None:
    session = await node.session([STDIO])
    [row] = await node.called(session, ("counting__add", {"a": "many"}))
    assert row["result"]["reason"] == "error"
    assert row["status"] == "settled"


async def test_a_secret_of_the_environment_reaches_no_result_event_or_transcript(node: Node) -> None:
    session = await node.session([STDIO])
    [row] = await node.called(session, ("counting__secret", {}))
    assert row["output"] == b"it is ***"
    assert "hunter22" not in str(await node.events(session))
    segments = await node.db.fetch("SELECT token_ids FROM segments WHERE session_id = $1", session)
    assert "hunter22" not in "".join(node.services.tokenizer.decode(each["token_ids"]) for each in segments)


async def test_what_another_tool_finds_out_of_a_server_s_secret_is_told_to_nobody(node: Node) -> None:
    session = await node.session([STDIO, "bash"])
    look = ("bash", {"command": "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep SECRET_WORD"})
    _, found = await node.called(session, ("counting__add", {"a": 1, "b": 2}), look)
    assert set(found["output"].splitlines()) == {b"SECRET_WORD=***"}


async def test_a_server_that_cannot_start_fails_the_message_in_a_sentence(node: Node) -> None:
    session = await node.session([{**STDIO, "command": ["no-such-server"]}])
    with pytest.raises(InvalidRequest, match=r"'counting' did not say what it offers: .*not found"):
        await node.take(session)


async def test_tools_that_were_picked_but_are_not_offered_are_named(node: Node) -> None:
    session = await node.session([{**STDIO, "tools": ["add", "subtract"]}])
    with pytest.raises(InvalidRequest, match="does not offer subtract"):
        await node.take(session)


async def test_a_listing_slower_than_any_heartbeat_does_not_look_dead(node: Node) -> None:
    slow = {**STDIO, "env": {**STDIO["env"], "START_AFTER": "/work/go"}}
    session = await node.session([slow])
    owner = await node.place(session)
    beats: asyncio.Queue[None] = asyncio.Queue()
    env = ActivityEnvironment()
    env.on_heartbeat = lambda *_: beats.put_nowait(None)
    taking = asyncio.ensure_future(env.run(Steps(node.services).take_input, InputIn(session, owner.epoch, 1, "m")))
    for _ in range(3):
        await beats.get()
    assert not taking.done()
    sandbox = await node.sandbox(owner)
    await sandbox.put("go", b"")
    assert (await taking).progress.outcome == "input"
    await sandbox.close()


async def test_cancel_ends_the_server_that_was_asked(node: Node) -> None:
    session = await node.session([STDIO])
    owner = await node.take(session)
    await node.think(owner, ("counting__hang", {}))
    env = ActivityEnvironment()
    running = asyncio.ensure_future(env.run(Steps(node.services).run_tools, StepIn(session, owner.epoch, 3)))
    sandbox = await node.sandbox(owner)
    while not await sandbox.wrote("mcp/counting/1", f"{session}/3/0/call"):
        await asyncio.sleep(0)
    env.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await sandbox.killall() == []
    await sandbox.close()


async def test_an_interrupt_ends_the_server_that_was_asked_and_tells_what_it_was(node: Node) -> None:
    session = await node.session([STDIO])
    owner = await node.take(session)
    await node.think(owner, ("counting__hang", {}))
    running = asyncio.ensure_future(node.run(owner))
    sandbox = await node.sandbox(owner)
    while not await sandbox.wrote("mcp/counting/1", f"{session}/3/0/call"):
        await asyncio.sleep(0)
    other = node.again()
    newer = await other.place(session)
    await other.interrupt(newer)
    [row] = await node.ledger(session)
    assert (row["result"]["reason"], row["output"]) == ("interrupted", b"it was stopped; what it did until then stays")
    there = await other.sandbox(newer)
    assert await there.killall() == []
    await there.close()
    await asyncio.gather(running, return_exceptions=True)
    await sandbox.close()


async def test_a_fork_has_the_tools_that_its_transcript_speaks_of(node: Node) -> None:
    session = await node.session([STDIO])
    await node.take(session)
    child = sessions.new_id("ses")
    await branches.fork(node.db, fleet.DEFAULT_TENANT, session, child, None, None)
    config = SessionConfig.model_validate((await sessions.get(node.db, child)).config)
    for each in (session, child):
        tools, listings = await catalog(node.services, each, config)
        assert tools.find("counting__add").remote == "add"
        assert listings["counting"]["handshake"]["serverInfo"]["name"] == "counting"
