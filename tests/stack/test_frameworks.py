"""Agents of other frameworks, unchanged, against the whole stack; and what happens to them when it is killed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import tenuto

from runtime.demo.stack import Stack
from tests.conftest import TEST_MODEL
from tests.stack.test_durable import NOTE
from tests.stack.test_openai_python import end_all

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

EXAMPLES = Path(__file__).parents[2] / "examples"
SLOW_NOTE = {**NOTE, "command": ["sh", "-c", "sleep 3; echo mark >> /work/notes; wc -l < /work/notes"]}


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="session")
async def nothing_is_left(stack: Stack) -> AsyncIterator[None]:
    yield
    await end_all(stack)


async def begun(stack: Stack, example: str, model: str = TEST_MODEL) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", str(EXAMPLES / example),
        env={
            **os.environ,
            "OPENAI_BASE_URL": f"{stack.api_url}/v1",
            "OPENAI_API_KEY": stack.api_key,
            "MODEL": model,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",  # it would go elsewhere
            "TEMPORAL_ADDRESS": str(stack.state()["temporal"]),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def said(process: asyncio.subprocess.Process) -> dict[str, str]:
    """What it printed: by the word before the colon."""
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return {name: value for line in out.decode().splitlines() for name, _, value in [line.partition(": ")]}


@pytest.mark.parametrize(
    ("example", "wanted"),
    [
        ("agents_sdk.py", {"turns": "2"}),
        ("pydantic_ai_agent.py", {}),
        ("langgraph_agent.py", {"said": "['human', 'ai', 'tool', 'ai']"}),
    ],
)
async def test_an_agent_runs_as_its_manual_says_and_its_next_turn_finds_its_kv(
    stack: Stack, example: str, wanted: dict[str, str]
) -> None:
    told = await said(await begun(stack, example))
    assert wanted.items() <= told.items()
    assert int(told["cached"]) > 100


async def test_temporals_own_plugin_runs_an_agent_against_us(stack: Stack) -> None:
    assert (await said(await begun(stack, "temporal_agent.py")))["answer"]


@pytest.mark.parametrize("part", ["node", "api", pytest.param("worker", marks=pytest.mark.soak)])
async def test_an_agent_whose_tool_is_killed_in_the_middle_finishes(
    stack: Stack, client: tenuto.AsyncClient, part: str
) -> None:
    await client.post(
        "/v1/agents", {"name": f"keeper-{part}", "tools": [SLOW_NOTE], "limits": {"max_think_tokens": 40}}
    )
    running = await begun(stack, "agents_sdk_inside.py", f"agent:keeper-{part}")
    session = await begun_by(client, f"keeper-{part}")
    async for event in session.stream():
        if event.type == "tool.started":
            break
    old = stack.kill(part)
    told = await said(running)
    assert told["items"] == "['mcp_call', 'message']"
    await stack.restarted(part, old)
    settled = [event for event in await session.events() if event.type == "tool.settled"]
    assert [event.data["preview"].strip() for event in settled] == ["1"]


async def begun_by(client: tenuto.AsyncClient, agent: str) -> tenuto.AsyncSession:
    while True:
        async for info in client.sessions.list(agent=agent):
            return await client.sessions.get(info.id)
        await asyncio.sleep(0.1)
