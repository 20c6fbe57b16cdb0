"""From the previous release to this one, in the middle of everything, on one home.

`PREVIOUS` names its commit. It is unpacked from the repository and run as it was, with the libraries of today.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import tenuto

from runtime.demo.run import demo_environment, left_in_stack
from runtime.demo.stack import Stack, running_stack
from tests.conftest import TEST_MODEL
from tests.stack.test_sessions import sleeper

pytestmark = [pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

ROOT = Path(__file__).parents[2]
PREVIOUS = (ROOT / "tests/upgrade/PREVIOUS").read_text().strip()
STORY = {"limits": {"max_think_tokens": 300}, "sampling": {"temperature": 1.2}, "seed": 1}
TOOL = {"tools": [sleeper(4.0)], "limits": {"max_think_tokens": 60}, "sampling": {"temperature": 0.8}, "seed": 2}
TALK = {"limits": {"max_think_tokens": 40}, "sampling": {"temperature": 0.8}, "seed": 3}
ONCE = {"tool_choice": "required", "max_tool_rounds": 1}


@pytest.fixture(scope="module")
def previous() -> Iterator[Path]:
    """The previous release, unpacked."""
    found = subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", f"{PREVIOUS}^{{commit}}"], check=False)
    if found.returncode:
        pytest.skip(f"the history of this repository does not reach back to {PREVIOUS[:12]}")
    place = Path(tempfile.mkdtemp(prefix="tenuto-previous-"))
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", PREVIOUS], check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", str(place)], input=archive, check=True)
    yield place
    shutil.rmtree(place)


@dataclass
class Left:
    """Sessions by what they were in the middle of, the tokens of each undisturbed, and the message it waits for."""

    sessions: dict[str, str] = field(default_factory=dict)
    expected: dict[str, list[int]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="tenuto-test-"))
    yield home
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def environment(home: Path) -> dict[str, str]:
    # One backend wherever this runs, and no image to build of each release.
    return {**demo_environment(home, TEST_MODEL), "TENUTO_SANDBOX": "bubblewrap"}


@pytest_asyncio.fixture(scope="module")
async def left(previous: Path, environment: dict[str, str], model_path: Path) -> Left:
    """What the previous release leaves when everything of it is killed."""
    left = Left()
    async with running_stack({**environment, "PYTHONPATH": str(previous)}, lambda _: None, cwd=previous) as stack:
        children = list(stack.state()["processes"].values())
        assert str(previous) in Path(f"/proc/{stack.process.pid}/environ").read_text()
        async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
            await undisturbed(client, left)
            think, tool, talk = [await client.sessions.create(**spec) for spec in (STORY, TOOL, TALK)]
            await talk.run("One.")
            left.messages["think"] = await think.send("Write a very long story.")
            left.messages["tool"] = await tool.send("Wait.", **ONCE)
            await asyncio.gather(reached(think, "model.delta"), reached(tool, "tool.started"))
            stack.signal("worker", signal.SIGSTOP)  # accepted, and nobody takes it
            left.messages["idle"] = await talk.send("Two.")
            left.sessions = {"think": think.id, "tool": tool.id, "idle": talk.id}
        stack.process.kill()
        await stack.process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        await asyncio.sleep(0.05)
    return left


async def undisturbed(client: tenuto.AsyncClient, left: Left) -> None:
    turns = {"think": (STORY, [("Write a very long story.", {})]), "tool": (TOOL, [("Wait.", ONCE)])}
    turns["idle"] = (TALK, [("One.", {}), ("Two.", {})])
    for name, (spec, messages) in turns.items():
        session = await client.sessions.create(**spec)
        for content, how in messages:
            await session.run(content, **how)
        left.expected[name] = await session.token_ids()
        await session.cancel()


async def reached(session: tenuto.AsyncSession, kind: str) -> None:
    async for event in session.stream():
        if event.type == kind:
            return


@pytest_asyncio.fixture(scope="module")
async def stack(left: Left, environment: dict[str, str]) -> AsyncIterator[Stack]:
    """This release, on the home that the previous one left."""
    async with running_stack(environment, lambda _: None) as running:
        yield running


@pytest_asyncio.fixture(scope="module")
async def client(stack: Stack) -> AsyncIterator[tenuto.AsyncClient]:
    async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
        yield client


@pytest.mark.parametrize("was_in", ["think", "tool", "idle"])
async def test_a_session_of_the_previous_release_ends_as_if_nothing_had_happened(client, left, was_in):
    session = await client.sessions.get(left.sessions[was_in])
    turn = tenuto.TurnReader(left.messages[was_in])
    seen = []
    async for event in session.stream():
        seen.append(event.id)
        turn.feed(event)
        if turn.done:
            break
    turn.result()
    assert await session.token_ids() == left.expected[was_in]
    assert seen == list(range(1, len(seen) + 1))
    started = [event.data["run"] for event in turn.events if event.type == "tool.started"]
    assert started == ([1] if was_in == "tool" else [])
    more = await session.run("And now?", tool_choice="none")
    assert more.events
    await session.cancel()


async def test_the_api_of_the_previous_release_works_on_the_schema_of_this_one(stack, previous):
    """During an upgrade both are there."""
    async with previous_api(stack, previous) as url, tenuto.AsyncClient(url, stack.api_key) as client:
        session = await client.sessions.create(**TALK)
        turn = await session.run("One.")
        assert turn.events[-1].type == "session.idle"
        assert (await session.cancel()).state == "cancelled"


async def test_ended_sessions_hold_nothing_after_an_upgrade(stack):
    assert await left_in_stack(stack) == []


@contextlib.asynccontextmanager
async def previous_api(stack: Stack, previous: Path) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    state = stack.state()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENUTO_")} | {
        "PYTHONPATH": str(previous),
        "TENUTO_HOME": str(stack.settings.home),
        "TENUTO_MODEL": TEST_MODEL,
        "TENUTO_POSTGRES_DSN": state["dsn"],
        "TENUTO_TEMPORAL_ADDRESS": state["temporal"],
        "TENUTO_API_PORT": str(port),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "runtime.api", env=environment, cwd=previous, stderr=asyncio.subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                assert process.returncode is None
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{url}/healthz")).is_success:
                        break
                await asyncio.sleep(0.05)
        yield url
    finally:
        process.terminate()
        await process.wait()
