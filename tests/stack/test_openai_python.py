"""OpenAI's own Python client against the whole stack: every endpoint, and connections that are lost at every event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import tenuto
from openai import AsyncOpenAI

from runtime.demo.stack import Stack
from runtime.store import Database
from tests.openai.published import check_event, check_response

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Look at a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["pier", "ferry"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
LOOK_CHAT: dict[str, Any] = {"type": "function", "function": {name: LOOK[name] for name in LOOK if name != "type"}}
SHELL: dict[str, Any] = {
    "type": "mcp",
    "server_label": "tenuto",
    "allowed_tools": ["bash"],
    "require_approval": "never",
}
BRIEF: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ai(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.api_url}/v1", api_key=stack.api_key, max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="session")
async def nothing_is_left(stack: Stack) -> AsyncIterator[None]:
    """Sessions behind responses live on for who comes back; here nobody does."""
    yield
    await end_all(stack)


async def end_all(stack: Stack) -> None:
    async with Database(stack.postgres_dsn) as db:
        rows = await db.fetch(
            "SELECT session_id FROM sessions WHERE metadata ? 'openai' AND state NOT IN ('cancelled', 'completed')"
        )
    async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
        for row in rows:
            await (await client.sessions.get(row["session_id"])).cancel()


def checked(response: Any) -> Any:
    check_response(response.model_dump(mode="json", exclude_unset=True, by_alias=True))
    return response


async def heard(stream: Any) -> list[dict[str, Any]]:
    told = []
    async for event in stream:
        told.append(event.model_dump(mode="json", exclude_unset=True, by_alias=True))
        check_event(told[-1])
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    return told


async def test_a_response_goes_on_from_another_and_finds_its_kv(ai: AsyncOpenAI) -> None:
    first = checked(await ai.responses.create(input="Say hello.", instructions="Be brief.", **BRIEF))
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert first.usage.output_tokens == 12
    again = checked(
        await ai.responses.create(
            input="Again.", instructions="Be brief.", previous_response_id=first.id, metadata={"n": "2"}, **BRIEF
        )
    )
    assert again.output_text
    assert again.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert again.runtime["session"] == first.runtime["session"]
    beside = checked(
        await ai.responses.create(input="No.", instructions="Be brief.", previous_response_id=first.id, **BRIEF)
    )
    assert beside.runtime["session"] != first.runtime["session"]
    assert beside.usage.input_tokens_details.cached_tokens > 0
    other = checked(await ai.responses.create(input="And?", previous_response_id=first.id, **BRIEF))
    assert other.runtime["session"] not in (first.runtime["session"], beside.runtime["session"])
    assert (await ai.responses.retrieve(again.id)).output_text == again.output_text
    items = [item async for item in await ai.responses.input_items.list(again.id, order="asc")]
    assert [item.role for item in items] == ["user", "assistant", "user"]
    await ai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        await ai.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        await ai.responses.create(input="x", previous_response_id=first.id, **BRIEF)
    assert gone.value.code == "previous_response_not_found"


async def test_functions_run_at_the_caller_and_the_turn_goes_on_with_their_results(ai: AsyncOpenAI) -> None:
    asked = {"tools": [LOOK], "temperature": 0, "max_output_tokens": 40}
    stream = await ai.responses.create(input="Look at the pier.", tool_choice="required", stream=True, **asked)
    told = await heard(stream)
    deltas = "".join(one["delta"] for one in told if one["type"] == "response.function_call_arguments.delta")
    response = told[-1]["response"]
    (call,) = response["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "look", deltas)
    assert json.loads(deltas)["place"] in ("pier", "ferry")
    with pytest.raises(openai.BadRequestError, match="No tool output found"):
        await ai.responses.create(input="Well?", previous_response_id=response["id"], **asked)
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Fog."}
    done = checked(
        await ai.responses.create(input=[output], previous_response_id=response["id"], tool_choice="none", **asked)
    )
    assert done.runtime["session"] == response["runtime"]["session"]
    assert done.output_text
    said: Any = [{"role": "user", "content": "Look at the pier."}, call, output]
    both = checked(await ai.responses.create(input=[*said, {"role": "user", "content": "So?"}], **asked))
    assert both.status in ("completed", "incomplete")


async def test_results_and_a_message_are_taken_in_that_order(ai: AsyncOpenAI, client: Any) -> None:
    asked = {"tools": [LOOK], "temperature": 0, "max_output_tokens": 40}
    first = await ai.responses.create(input="Look.", tool_choice={"type": "function", "name": "look"}, **asked)
    call: Any = first.output[0]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Fog."}
    more = checked(
        await ai.responses.create(
            input=[output, {"role": "user", "content": "Say yes."}],  # type: ignore[list-item]
            previous_response_id=first.id,
            tool_choice="none",
            **asked,
        )
    )
    steps = await (await client.sessions.get(more.runtime["session"])).steps()  # type: ignore[attr-defined]
    assert [step["kind"] for step in steps] == ["input", "think", "tool", "input", "think"]


async def test_the_sandboxes_own_tools_run_inside(ai: AsyncOpenAI) -> None:
    stream = await ai.responses.create(
        input="Run: echo tide", tools=[SHELL], tool_choice="required", max_tool_calls=1, stream=True, temperature=0,
        max_output_tokens=60,
    )  # fmt: skip
    told = await heard(stream)
    kinds = [one["type"] for one in told]
    assert "response.mcp_call_arguments.done" in kinds
    assert "response.mcp_call.completed" in kinds or "response.mcp_call.failed" in kinds
    called = next(item for item in told[-1]["response"]["output"] if item["type"] == "mcp_call")
    assert (called["name"], called["server_label"]) == ("bash", "tenuto")


async def test_a_stream_that_is_cut_after_any_event_goes_on_from_there(ai: AsyncOpenAI, stack: Stack) -> None:
    made = await ai.responses.create(input="Count.", background=True, stream=True, **BRIEF)
    whole = await heard(made)
    response_id = whole[0]["response"]["id"]
    assert [one["type"] for one in whole[:3]] == ["response.created", "response.queued", "response.in_progress"]
    for cut in range(len(whole)):
        stream = await ai.responses.retrieve(response_id, stream=True, starting_after=cut)
        rest = [event.model_dump(mode="json", exclude_unset=True, by_alias=True) async for event in stream]
        assert rest == whole[cut + 1 :], cut
    live = await ai.responses.create(input="Count on.", stream=True, **BRIEF)
    first = await anext(aiter(live))
    await live.close()
    kept = await ended(ai, first.response.id)  # type: ignore[union-attr]
    assert kept.output_text


async def ended(ai: AsyncOpenAI, response_id: str) -> Any:
    while (response := await ai.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.05)
    return checked(response)


async def test_one_in_the_background_is_cancelled_and_keeps_what_it_said(ai: AsyncOpenAI) -> None:
    numbers = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "minItems": 3000}
    form: Any = {"type": "json_schema", "name": "numbers", "schema": numbers}
    made = await ai.responses.create(
        input="Numbers.", background=True, max_output_tokens=4000, text={"format": form}, temperature=0
    )
    assert made.status in ("queued", "in_progress")
    while not (await ai.responses.retrieve(made.id)).output:
        await asyncio.sleep(0.05)
    cancelled = checked(await ai.responses.cancel(made.id))
    assert cancelled.status == "cancelled"
    assert cancelled.output_text
    assert (await ai.responses.cancel(made.id)).status == "cancelled"
    told = await heard(await ai.responses.retrieve(made.id, stream=True))
    assert (told[-1]["type"], told[-1]["response"]["status"]) == ("response.incomplete", "cancelled")


async def test_an_answer_is_of_its_schema_and_told_with_its_likelihood(ai: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    made = await ai.responses.create(
        input="A number.",
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        temperature=0,
        max_output_tokens=40,
    )
    part: Any = checked(made).output[0].content[0]
    assert isinstance(json.loads(part.text)["n"], int)
    assert "".join(one.token for one in part.logprobs) == part.text
    assert len(part.logprobs[0].top_logprobs) == 2


async def test_a_conversation_is_kept_and_goes_on(ai: AsyncOpenAI) -> None:
    conversation = await ai.conversations.create(
        items=[{"type": "message", "role": "user", "content": "My name is Ada."}], metadata={"a": "b"}
    )
    first = checked(await ai.responses.create(conversation=conversation.id, input="Hello.", **BRIEF))
    second = checked(await ai.responses.create(conversation=conversation.id, input="Who am I?", **BRIEF))
    assert second.runtime["session"] == first.runtime["session"]
    items = [item async for item in await ai.conversations.items.list(conversation.id, order="asc")]
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    assert (await ai.conversations.items.retrieve(items[0].id, conversation_id=conversation.id)).type == "message"  # type: ignore[arg-type]
    await ai.conversations.items.create(conversation.id, items=[{"type": "message", "role": "user", "content": "Hm."}])
    third = checked(await ai.responses.create(conversation=conversation.id, input="So?", **BRIEF))
    assert third.runtime["session"] != first.runtime["session"]  # somebody has said more than the session knows
    assert (await ai.conversations.update(conversation.id, metadata={"c": "d"})).metadata == {"c": "d"}
    await ai.conversations.items.delete(items[0].id, conversation_id=conversation.id)  # type: ignore[arg-type]
    assert (await ai.conversations.delete(conversation.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await ai.conversations.retrieve(conversation.id)


async def test_chats_find_their_session_by_what_was_said(ai: AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    brief: dict[str, Any] = {"model": (await ai.models.list()).data[0].id, "max_tokens": 12, "temperature": 0}
    first = await ai.chat.completions.create(messages=messages, **brief)
    assert (first.choices[0].finish_reason, first.usage.completion_tokens) == ("length", 12)  # type: ignore[union-attr]
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Again."}]
    stream = await ai.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **brief
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens  # type: ignore[union-attr]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == (await ai.chat.completions.create(messages=messages, **brief)).choices[0].message.content


async def test_chats_call_functions_and_go_on_with_what_they_gave(ai: AsyncOpenAI) -> None:
    model = (await ai.models.list()).data[0].id
    asked: dict[str, Any] = {"model": model, "tools": [LOOK_CHAT], "temperature": 0, "max_completion_tokens": 40}
    messages: list[Any] = [{"role": "user", "content": "Look at the ferry."}]
    async with ai.chat.completions.stream(messages=messages, tool_choice="required", **asked) as stream:
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    messages += [
        {"role": "assistant", "tool_calls": [call.model_dump(include={"id", "type", "function"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "Fog."},
    ]
    done = await ai.chat.completions.create(messages=messages, tool_choice="none", **asked)
    assert done.choices[0].message.content
    assert done.usage.prompt_tokens_details.cached_tokens > 0  # type: ignore[union-attr]


async def test_seeds_stops_choices_and_likelihoods_of_chats(ai: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": (await ai.models.list()).data[0].id,
        "messages": [{"role": "user", "content": "Tell me of the sea."}],
        "max_tokens": 16,
        "seed": 7,
    }
    one, same = [await ai.chat.completions.create(**asked) for _ in range(2)]
    assert one.choices[0].message.content == same.choices[0].message.content
    several = await ai.chat.completions.create(n=3, logprobs=True, top_logprobs=1, **asked)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.choices[0].message.content == one.choices[0].message.content
    assert len({choice.message.content for choice in several.choices}) > 1
    said = several.choices[0].logprobs.content  # type: ignore[union-attr]
    assert "".join(token.token for token in said or ()) == several.choices[0].message.content
    word = (one.choices[0].message.content or "").split()[2]
    stopped = await ai.chat.completions.create(stop=[word], **asked)
    assert stopped.choices[0].finish_reason == "stop"
    assert word not in (stopped.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("responses", {"input": [{"type": "file_search_call"}]}, "input[0].type"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("responses", {"input": "x", "model": "gpt-none"}, "model"),
        ("responses", {"input": "x", "tool_choice": "never"}, "tool_choice"),
        ("responses", {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ("responses", {"input": "x", "frobnicate": 1}, "frobnicate"),
        ("responses", {}, "input"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "functions": []}, None),
        ("chat/completions", {"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]}, "input"),
        ("chat/completions", {"messages": []}, "messages"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(stack: Stack, path: str, body: Any, param: str | None) -> None:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {stack.api_key}"}) as http:
        answer = await http.post(f"{stack.api_url}/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert param is None or error["param"] == param, error


async def test_a_try_again_is_given_what_the_first_made_and_only_once(stack: Stack) -> None:
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    body = {"input": "Only once.", **BRIEF}
    async with httpx.AsyncClient(headers=headers, timeout=60, base_url=f"{stack.api_url}/v1") as http:

        async def tried(count: int) -> str:
            answer = await http.post("/responses", json=body, headers={"x-stainless-retry-count": str(count)})
            return str(answer.json()["id"])

        first = await tried(0)
        assert await tried(1) == first
        assert await tried(1) != first  # somebody else's first try again
