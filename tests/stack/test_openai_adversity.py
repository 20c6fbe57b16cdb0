"""OpenAI's face where things go wrong: calls that wait for a person, requests that meet, and an API that is killed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from runtime.demo.stack import Stack
from tests.stack.test_openai_python import BRIEF, LOOK, SHELL, ai, checked, heard, nothing_is_left

__all__ = ["ai", "nothing_is_left"]
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

ASKS: dict[str, Any] = {
    "tools": [{**SHELL, "require_approval": "always"}],
    "temperature": 0,
    "max_output_tokens": 60,
}


async def asked(ai: AsyncOpenAI, **more: Any) -> Any:
    told = await heard(
        await ai.responses.create(input="Run: echo tide", tool_choice="required", stream=True, **ASKS, **more)
    )
    assert told[-1]["type"] == "response.completed"
    assert not [one for one in told if "mcp_call" in one["type"]]
    response = told[-1]["response"]
    assert response["output"][-1]["type"] == "mcp_approval_request"
    assert response["output"][-1]["name"] == "bash"
    return response


def word(response: Any, approve: bool, **more: Any) -> Any:
    request_id = response["output"][-1]["id"]
    return {"type": "mcp_approval_response", "approval_request_id": request_id, "approve": approve, **more}


async def test_a_call_that_is_approved_by_an_item_runs_and_the_turn_goes_on(ai: AsyncOpenAI) -> None:
    first = await asked(ai)
    with pytest.raises(openai.BadRequestError, match="No approval response found"):
        await ai.responses.create(input="Well?", previous_response_id=first["id"], **ASKS)
    other: Any = {**word(first, True), "approval_request_id": "qst_none"}
    with pytest.raises(openai.BadRequestError, match=r"qst_none|No approval"):
        await ai.responses.create(input=[other], previous_response_id=first["id"], **ASKS)
    stream = await ai.responses.create(
        input=[word(first, True)], previous_response_id=first["id"], tool_choice="none", stream=True, **ASKS
    )
    done = (await heard(stream))[-1]["response"]
    assert done["runtime"]["session"] == first["runtime"]["session"]
    called = done["output"][0]
    assert (called["type"], called["approval_request_id"]) == ("mcp_call", first["output"][-1]["id"])
    assert called["arguments"] == first["output"][-1]["arguments"]
    assert called["status"] in ("completed", "failed")
    assert done["output"][-1]["type"] == "message"
    assert done["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"]
    again = await heard(await ai.responses.retrieve(done["id"], stream=True))
    assert again[-1]["response"] == done
    with pytest.raises(openai.BadRequestError, match="waits for no answer"):  # a fork would need its own approval
        await ai.responses.create(input=[word(first, True)], previous_response_id=first["id"], **ASKS)


async def test_a_client_that_keeps_everything_itself_declines_and_goes_on(ai: AsyncOpenAI) -> None:
    first = await asked(ai, store=False)
    said: list[Any] = [{"role": "user", "content": "Run: echo tide"}, *first["output"]]
    said += [word(first, False, reason="Not today.")]
    second = checked(await ai.responses.create(input=said, tool_choice="none", store=False, **ASKS))
    assert second.runtime["session"] == first["runtime"]["session"]
    (called,) = [item for item in second.output if item.type == "mcp_call"]
    assert called.status == "failed"
    assert "declined: Not today." in called.output
    said += [item.model_dump(mode="json", exclude_unset=True) for item in second.output]
    said += [{"role": "user", "content": "Well."}]
    third = checked(await ai.responses.create(input=said, tool_choice="none", store=False, **ASKS))
    assert third.runtime["session"] == first["runtime"]["session"]
    assert third.usage.input_tokens_details.cached_tokens >= second.usage.input_tokens // 2


async def test_functions_and_approvals_of_an_agent_are_told_as_those_of_a_request(ai: AsyncOpenAI, client: Any) -> None:
    look = {"type": "client", "name": "look", "description": "Look.", "parameters": LOOK["parameters"]}
    await client.post("/v1/agents", {"name": "keeper", "tools": ["bash", look], "approvals": {"bash": {}}})
    asked = {"model": "agent:keeper", "temperature": 0, "max_output_tokens": 60}
    first = await ai.responses.create(input="Look.", tool_choice={"type": "function", "name": "look"}, **asked)
    (call,) = checked(first).output
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Fog."}
    bash: Any = {"type": "function", "name": "bash"}
    second = checked(
        await ai.responses.create(input=[output], previous_response_id=first.id, tool_choice=bash, **asked)
    )
    assert second.output[-1].type == "mcp_approval_request"
    gave: Any = {"type": "mcp_approval_response", "approval_request_id": second.output[-1].id, "approve": True}
    third = checked(
        await ai.responses.create(input=[gave], previous_response_id=second.id, tool_choice="none", **asked)
    )
    assert third.output[0].type == "mcp_call"
    assert len({one.runtime["session"] for one in (first, second, third)}) == 1


async def test_what_somebody_else_approved_is_told_to_whom_asks(ai: AsyncOpenAI, stack: Stack) -> None:
    first = await asked(ai)
    request_id = first["output"][-1]["id"]
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {stack.api_key}"}) as http:
        answer = await http.post(f"{stack.api_url}/v1/approvals/{request_id}", json={"decision": "approve"})
        assert answer.status_code == 200, answer.text
    with pytest.raises(openai.BadRequestError, match="answered already"):
        await ai.responses.create(input=[word(first, False)], previous_response_id=first["id"], **ASKS)
    done = checked(await ai.responses.create(input=[word(first, True)], previous_response_id=first["id"], **ASKS))
    assert done.output[0].type == "mcp_call"
    assert done.runtime["session"] == first["runtime"]["session"]


async def test_approval_and_a_message_at_once_are_taken_in_that_order(ai: AsyncOpenAI, client: Any) -> None:
    first = await asked(ai)
    said: Any = [word(first, True), {"role": "user", "content": "Say yes."}]
    done = checked(await ai.responses.create(input=said, previous_response_id=first["id"], tool_choice="none", **ASKS))
    assert [item.type for item in done.output] == ["mcp_call", "message"]
    steps = await (await client.sessions.get(done.runtime["session"])).steps()
    assert [step["kind"] for step in steps] == ["input", "think", "tool", "input", "think"]


async def test_two_that_go_on_from_the_same_response_at_once_both_find_its_kv(ai: AsyncOpenAI) -> None:
    first = await ai.responses.create(input="Say hello.", **BRIEF)
    both = await asyncio.gather(
        *(ai.responses.create(input=said, previous_response_id=first.id, **BRIEF) for said in ("One.", "Two."))
    )
    assert len({checked(one).runtime["session"] for one in both}) == 2
    assert first.runtime["session"] in {one.runtime["session"] for one in both}
    assert all(one.usage.input_tokens_details.cached_tokens > 0 for one in both)


async def test_two_turns_of_a_conversation_at_once_are_both_kept(ai: AsyncOpenAI) -> None:
    conversation = await ai.conversations.create()
    asked = (ai.responses.create(input=said, conversation=conversation.id, **BRIEF) for said in ("One.", "Two."))
    made = await asyncio.gather(*asked, return_exceptions=True)
    kept = [one for one in made if not isinstance(one, BaseException)]
    assert kept, made
    assert all(isinstance(one, openai.ConflictError) for one in made if isinstance(one, BaseException)), made
    items = [item async for item in await ai.conversations.items.list(conversation.id, order="asc")]
    assert len(items) == 2 * len(kept)


async def test_a_conversation_that_is_deleted_while_it_goes_on_ends_no_response(ai: AsyncOpenAI) -> None:
    conversation = await ai.conversations.create()
    stream = await ai.responses.create(input="Count.", conversation=conversation.id, stream=True, **BRIEF)
    events = aiter(stream)
    first: Any = await anext(events)
    assert (await ai.conversations.delete(conversation.id)).deleted
    rest: list[Any] = [event async for event in events]
    assert rest[-1].type in ("response.completed", "response.incomplete")
    assert (await ai.responses.retrieve(first.response.id)).output_text


async def test_a_response_that_is_deleted_while_it_goes_on_is_told_to_its_end(ai: AsyncOpenAI) -> None:
    stream = await ai.responses.create(input="Count.", stream=True, **BRIEF)
    events = aiter(stream)
    first: Any = await anext(events)
    await ai.responses.delete(first.response.id)
    rest: list[Any] = [event async for event in events]
    assert rest[-1].type in ("response.completed", "response.incomplete")
    with pytest.raises(openai.NotFoundError):
        await ai.responses.retrieve(first.response.id)


async def test_who_used_the_session_otherwise_does_not_change_what_a_response_goes_on_from(
    ai: AsyncOpenAI, client: Any
) -> None:
    first = await ai.responses.create(input="Say hello.", **BRIEF)
    session = await client.sessions.get(first.runtime["session"])
    await session.run("Something else.")
    after = checked(await ai.responses.create(input="Again.", previous_response_id=first.id, **BRIEF))
    assert after.runtime["session"] != first.runtime["session"]
    assert after.usage.input_tokens_details.cached_tokens > 0


async def test_a_stream_goes_on_after_the_api_was_killed_in_its_middle(ai: AsyncOpenAI, stack: Stack) -> None:
    numbers = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "minItems": 60}
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": numbers}}
    stream = await ai.responses.create(input="Numbers.", stream=True, text=form, temperature=0, max_output_tokens=150)
    seen: list[dict[str, Any]] = []
    pid = stack.pid("api")
    assert pid is not None
    with contextlib.suppress(httpx.TransportError, openai.APIError):
        async for event in stream:
            seen.append(event.model_dump(mode="json", exclude_unset=True, by_alias=True))
            if len(seen) == 8:
                stack.kill("api")
    assert seen[-1]["type"] == "response.output_text.delta"
    await stack.restarted("api", pid)
    response_id = seen[0]["response"]["id"]
    patient = ai.with_options(max_retries=10)
    rest = await patient.responses.retrieve(response_id, stream=True, starting_after=seen[-1]["sequence_number"])
    told = seen + [event.model_dump(mode="json", exclude_unset=True, by_alias=True) async for event in rest]
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    assert told == await heard(await ai.responses.retrieve(response_id, stream=True))
    text = "".join(one["delta"] for one in told if one["type"] == "response.output_text.delta")
    assert text == checked(await ai.responses.retrieve(response_id)).output_text
