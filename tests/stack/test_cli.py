"""`tenuto run`, `logs -f` and answers on the command line, against the whole stack."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import tenuto

from runtime.demo.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

NOTE = {
    "name": "note",
    "description": "Write a note down.",
    "parameters": {"type": "object", "properties": {"word": {"enum": ["tide"]}}, "required": ["word"]},
    "command": ["sh", "-c", "echo noted"],
}
AGENT = {"tools": [NOTE], "approvals": {"note": {}}, "limits": {"max_think_tokens": 40}}


@pytest_asyncio.fixture(loop_scope="session")
async def agent(client: tenuto.AsyncClient) -> AsyncIterator[str]:
    name = f"cli-{os.urandom(4).hex()}"
    await client.agents.create(name, **AGENT)
    yield name
    await client.agents.archive(name)


async def begin(stack: Stack, *argv: str) -> Process:
    environment = {**os.environ, "TENUTO_API_URL": stack.api_url, "TENUTO_API_KEY": stack.api_key}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "runtime.cli",
        *argv,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # whoever started us may ignore it
    )


async def ran(stack: Stack, *argv: str) -> tuple[int | None, str, str]:
    """Exit status, standard output and errors."""
    process = await begin(stack, *argv)
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


async def test_a_run_stops_at_a_question_which_is_answered_and_the_session_goes_on(
    stack: Stack, client: tenuto.AsyncClient, agent: str
) -> None:
    how = ("--tool-choice", "required", "--rounds", "1")
    status, _, errors = await ran(stack, "run", "Note it.", "--agent", agent, *how)
    assert (status, "waits for approval of note" in errors) == (3, True), errors
    session_id = errors.split()[1]
    following = await begin(stack, "logs", "-f", "--json", session_id)
    _, listed, _ = await ran(stack, "approvals", "--session", session_id, "--json")
    question = json.loads(listed)
    assert (question["kind"], question["about"]["name"]) == ("approval", "note")
    status, _, errors = await ran(stack, "approve", question["id"], "--stop")
    assert (status, "give --decline REASON, or nothing" in errors) == (2, True)
    assert await ran(stack, "approve", question["id"]) == (0, f"{question['id']}: approve\n", "")
    await (await client.sessions.get(session_id)).until("idle")
    status, out, errors = await ran(stack, "run", "Again.", "--session", session_id, "--approve", "all", *how)
    assert (status in (0, 3), "[note] noted" in errors, bool(out.strip())) == (True, True, True), errors
    assert (await ran(stack, "sessions", "complete", session_id))[:2] == (0, f"{session_id} is completed\n")
    followed, _ = await following.communicate()
    events = [json.loads(line) for line in followed.splitlines()]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert (following.returncode, events[-1]["type"]) == (0, "session.completed")


async def test_ctrl_c_ends_the_turn_and_keeps_the_session(stack: Stack, client: tenuto.AsyncClient, agent: str) -> None:
    long = await client.agents.revise(agent, limits={"max_think_tokens": 6000})  # no end in sight
    story = ("run", "Tell me a long story about a ferry.", "--tool-choice", "none")
    process = await begin(stack, *story, "--agent", f"{agent}@{long.id}")
    assert process.stdout is not None
    await process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = await process.communicate()
    session_id = errors.split()[1].decode()
    session = await client.sessions.get(session_id)
    try:
        assert process.returncode == 130
        assert f"tenuto run --session {session_id} TASK" in errors.decode()
        await session.until("idle")
        assert "session.interrupted" in [event.type for event in await session.events()]
    finally:
        await session.cancel()
