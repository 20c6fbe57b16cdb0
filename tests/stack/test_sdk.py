"""Both clients against the whole stack."""

from __future__ import annotations

import asyncio

import pytest
import tenuto

from runtime.demo.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

ECHO = {
    "name": "echo",
    "description": "Say a word.",
    "parameters": {"type": "object", "properties": {"word": {"enum": ["tide"]}}, "required": ["word"]},
    "command": ["sh", "-c", "sleep 0.3; echo tide"],
}
SESSION = {"tools": [ECHO], "limits": {"max_think_tokens": 60}, "sampling": {"temperature": 0.8}, "seed": 41}
HOW = {"tool_choice": "required", "max_tool_rounds": 1}


def blocking_run(url: str, key: str) -> tuple[list[int], tenuto.Turn, tenuto.SessionInfo]:
    with tenuto.Client(url, key) as client:
        session = client.sessions.create(**SESSION)
        turn = session.run("Say tide.", **HOW)
        tokens = session.token_ids()
        assert session.position() == session.events()[-1].id == turn.events[-1].id
        return tokens, turn, session.cancel()


async def test_both_clients_give_the_same_turn(stack: Stack, client: tenuto.AsyncClient) -> None:
    tokens, turn, ended = await asyncio.to_thread(blocking_run, stack.api_url, stack.api_key)
    session = await client.sessions.create(**SESSION)
    other = await session.run("Say tide.", **HOW)
    assert await session.token_ids() == tokens
    assert (other.text, other.outcome) == (turn.text, turn.outcome)
    assert [call["preview"] for call in other.tool_calls] == [call["preview"] for call in turn.tool_calls] == ["tide\n"]
    assert (await session.cancel()).state == ended.state == "cancelled"


async def test_a_run_gives_its_own_turn_though_others_wait_before_and_after_it(client: tenuto.AsyncClient) -> None:
    session = await client.sessions.create(**SESSION)
    first = await session.send("Say tide.", **HOW)
    running = asyncio.create_task(session.run("And now?", tool_choice="none"))
    async for event in session.stream():
        if event.type == "tool.started":
            break
    last = await session.send("And then?", tool_choice="none")
    turn = await running
    (own,) = [event for event in turn.events if event.data.get("outcome") == "input"]
    assert own.data["message_id"] not in (first, last)
    assert turn.tool_calls == []
    assert turn.text
    await session.cancel()


async def test_a_message_for_a_session_that_ended_is_refused_with_a_code(client: tenuto.AsyncClient) -> None:
    session = await client.sessions.create(**SESSION)
    await session.cancel()
    with pytest.raises(tenuto.APIError) as caught:
        await session.send("Hello?")
    assert caught.value.status == 409
    assert "cancelled" in str(caught.value)
