"""A whole stack in front of a model server that is none of ours: llama.cpp's, killed and begun again with the rest."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import tenuto

from engine import RequestError, Sampling
from engine.external.remote import Timeouts
from engine.tokens import byte_chat
from runtime.demo.play import outside_log
from runtime.demo.run import demo_environment, left_in_stack
from runtime.demo.stack import Stack, leftovers, running_stack
from tests.conftest import MODELS_DIR, TEST_MODEL
from tests.engine.external.scripted import engine_for
from tests.engine.external.test_server import ask
from tests.llama import KEY, Llama, llama

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

_, CHAT = byte_chat()
MODEL = "qwen2.5-coder-0.5b-instruct"
NOTE = {
    "name": "note",
    "description": "Write a note down.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "enum": ["tide", "ferry"]}},
        "required": ["word"],
    },
    "command": [
        "sh",
        "-c",
        "umask 0; echo $TENUTO_CALL_KEY >> /mnt/outside/${TENUTO_CALL_KEY%%/*}.log; sleep 0.7; echo written",
    ],
}
SPEC = {
    "system": "Answer with a call of the tool, as JSON and nothing else:"
    ' {"name": "note", "arguments": {"word": "ferry"}}. Once it is written, say: done.',
    "tools": [NOTE],
    "limits": {"max_think_tokens": 40},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[Llama]:
    async with llama(MODELS_DIR / f"{MODEL}.gguf", "org/small-model") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outside(server: Llama) -> AsyncIterator[Stack]:
    """The stack whose model runs outside of it."""
    home = Path(tempfile.mkdtemp(prefix="tenuto-test-"))
    environment = {**demo_environment(home, f"openai:{server.url}"), "TENUTO_OPENAI_KEY": KEY}
    async with running_stack(environment, lambda _: None) as running:
        yield running
        pids = dict(running.state()["processes"])
    assert leftovers(running, pids) == []
    shutil.rmtree(home)


class Killer:
    """Kills a part of the stack, or the server, in the nth step of a kind; in a think once it has said something."""

    def __init__(self, stack: Stack, server: Llama, plan: dict[tuple[str, int], str]) -> None:
        self._stack, self._server, self._plan = stack, server, dict(plan)
        self._seen: dict[str, set[int]] = {"think": set(), "tool": set()}
        self.restarts: list[asyncio.Task[None]] = []

    @property
    def left(self) -> dict[tuple[str, int], str]:
        return self._plan

    def feed(self, event: tenuto.Event) -> None:
        kind = {"model.delta": "think", "tool.started": "tool"}.get(event.type)
        if kind is None:
            return
        self._seen[kind].add(event.step)
        part = self._plan.pop((kind, len(self._seen[kind])), None)
        if part == "server":
            self._server.kill()
            self.restarts.append(asyncio.create_task(self._server.start()))
        elif part is not None:
            self._stack.kill(part)


async def play(
    stack: Stack, server: Llama, plan: dict[tuple[str, int], str], choice: str = "auto", **spec
) -> tuple[list, str]:
    """Events of two messages with these kills, and the calls that the tool itself counted."""
    killer = Killer(stack, server, plan)
    async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
        session = await client.sessions.create(**{**SPEC, **spec})
        await session.send("Write down the word tide.", tool_choice=choice, max_tool_rounds=1)
        turn = tenuto.TurnReader(await session.send("Tell me a story of a ferry.", tool_choice="none"))
        async for event in session.stream():
            killer.feed(event)
            turn.feed(event)
            assert event.type != "session.failed", event.data
            if turn.done:
                break
        await asyncio.gather(*killer.restarts)
        assert killer.left == {}
        events = await session.events()
        await session.cancel()
    return events, outside_log(stack, session.id).read_text()


def of_type(events: list, kind: str) -> list:
    return [event for event in events if event.type == kind]


async def test_a_session_completes_whatever_died_and_no_tool_runs_twice(outside, server):
    plan = {("think", 1): "engine", ("tool", 1): "node", ("think", 2): "server"}
    events, calls = await play(outside, server, plan)
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert len(calls.split()) == len(of_type(events, "tool.settled")) == 1
    thinks = [event.data for event in of_type(events, "step.completed") if "usage" in event.data]
    assert all(think["exact"] is False and think["sampled"] for think in thinks)
    assert of_type(events, "step.retrying")
    assert await left_in_stack(outside) == []


async def test_a_second_tenuto_is_a_server_like_any_other(stack, client):
    """The chat completions of one installation behind the engine of another."""
    async with engine_for(f"{stack.api_url}/v1", key=stack.api_key, timeouts=Timeouts(5.0, 60.0, 60.0)) as engine:
        assert (engine.card.model, engine.card.server) == (TEST_MODEL, "tenuto")
        text, done, _ = await ask(engine, token_ids=[*CHAT.user("Hi"), *CHAT.assistant_open()], max_tokens=6)
        assert text
        assert done.usage["completion_tokens"] <= 6
        with pytest.raises(RequestError, match="top_k"):
            await ask(engine, token_ids=[*CHAT.user("Hi"), *CHAT.assistant_open()], sampling=Sampling(top_k=2))
    for session in (await client.get("/v1/sessions"))["data"]:
        await client.post(f"/v1/sessions/{session['id']}/cancel")
