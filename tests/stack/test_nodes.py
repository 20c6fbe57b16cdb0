"""Two nodes as real processes: who gets a session, who loses it, and that a node that comes back writes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import tenuto

from engine import EngineClient
from runtime.demo.play import Kill, Played, play
from runtime.demo.run import demo_environment, left_in_stack
from runtime.demo.stack import Stack, leftovers, running_stack
from tests.conftest import TEST_MODEL
from tests.stack.test_kills import assert_exact, spec
from tests.stack.test_sessions import sleeper

pytestmark = [pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

LONG = "tide " * 300


@pytest_asyncio.fixture(scope="module")
async def stack(model_path: Path) -> AsyncIterator[Stack]:
    home = Path(tempfile.mkdtemp(prefix="tenuto-test-"))
    environment = {**demo_environment(home, TEST_MODEL), "TENUTO_NODES": "2", "TENUTO_WORKERS": "2"}
    async with running_stack(environment, lambda _: None) as running:
        pids = dict(running.state()["processes"])
        yield running
        pids |= running.state()["processes"]
    assert leftovers(running, pids) == []
    shutil.rmtree(home)


@pytest_asyncio.fixture(scope="module")
async def client(stack: Stack) -> AsyncIterator[tenuto.AsyncClient]:
    async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
        yield client


@pytest_asyncio.fixture(scope="module")
async def calm(stack: Stack, client: tenuto.AsyncClient) -> Played:
    return await play(stack, client, spec(11))


async def command(stack: Stack, *arguments: str) -> tuple[int, str]:
    """`tenuto …` as an operator of this installation types it: exit status and output."""
    environment = {**os.environ, "TENUTO_HOME": str(stack.settings.home), "TENUTO_API_URL": stack.api_url}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "runtime.cli", *arguments, stdout=asyncio.subprocess.PIPE, env=environment
    )
    out, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode()


async def states(client: tenuto.AsyncClient) -> dict[str, str]:
    return {one["id"]: one["state"] for one in (await client.get("/v1/admin/nodes"))["data"]}


@pytest_asyncio.fixture(autouse=True)
async def both_up(stack: Stack, client: tenuto.AsyncClient) -> AsyncIterator[None]:
    """A node that was drained takes sessions again once it is wanted back."""
    yield
    for node, state in (await states(client)).items():
        if state in ("draining", "drained"):
            with contextlib.suppress(tenuto.APIError):  # it is on its way already
                await client.post(f"/v1/admin/nodes/{node}/undrain")
    while set((await states(client)).values()) != {"up"}:
        await asyncio.sleep(0.1)


async def placements(session: tenuto.AsyncSession) -> list[tuple[str | None, str, str]]:
    """From where, to where and why, in order."""
    return [
        (event.data["from"], event.data["node"], event.data["reason"])
        for event in await session.events()
        if event.type == "session.placed"
    ]


async def reached(session: tenuto.AsyncSession, kind: str) -> tenuto.Event:
    async for event in session.stream():
        if event.type == kind:
            return event
    raise AssertionError(f"the session ended without {kind}")


async def shared(stack: Stack, node: str, session_id: str) -> None:
    """Wait until the pages that a node's engine has of a session are in the shared store as well."""
    async with await EngineClient.connect(stack.engine_addresses[node]) as engine:
        keys = set((await engine.kv_state(session_id)).keys)
    while not keys <= {path.name for path in (stack.settings.home / "shared-kv" / "pages").rglob("*")}:
        await asyncio.sleep(0.05)


def of_think(turn: tenuto.Turn) -> dict:
    return [event for event in turn.events if event.type == "step.completed"][-1].data["kv"]


async def test_each_node_has_processes_and_tiers_of_its_own(stack, client):
    names = set(stack.state()["processes"])
    assert {"node-1", "node-2", "engine-1", "engine-2", "worker-1", "worker-2"} <= names
    home = stack.settings.home
    assert (home / "kv").is_dir()
    assert (home / "kv-2").is_dir()
    assert (home / "shared-kv").is_dir()
    assert await states(client) == {"node-1": "up", "node-2": "up"}
    status, text = await command(stack, "nodes", "--json")
    assert status == 0
    assert [json.loads(line)["id"] for line in text.splitlines()] == ["node-1", "node-2"]


async def test_sessions_go_to_the_node_that_has_least_to_do_and_come_back_to_it(client):
    both = [
        await client.sessions.create(tools=[sleeper(1.0)], limits={"max_think_tokens": 60}, seed=seed)
        for seed in (1, 2)
    ]
    for session in both:
        await session.send("Wait.", tool_choice="required", max_tool_rounds=1)
        await reached(session, "step.started")
    for session in both:
        await reached(session, "session.idle")
        await session.run("And now?", tool_choice="none")
    assert [await placements(session) for session in both] == [[(None, "node-1", "new")], [(None, "node-2", "new")]]
    for session in both:
        await session.cancel()


@pytest.mark.parametrize(
    ("part", "moment", "after"),
    [
        ("node-1", "think", 5),
        pytest.param("node-1", "tool", 0.5, marks=pytest.mark.soak),
        pytest.param("engine-1", "think", 5, marks=pytest.mark.soak),
    ],
)
async def test_one_that_was_stopped_and_comes_back_changes_nothing(stack, client, calm, part, moment, after):
    """The other node goes on; what was stopped wakes up while it does."""
    placed: list[tenuto.Event] = []

    def watch(event: tenuto.Event) -> None:
        if event.type == "session.placed":
            placed.append(event)
            if len(placed) == 2:
                stack.signal(part, signal.SIGCONT)

    try:
        stop = Kill(moment, 2, after, (part,), signal.SIGSTOP)
        played = await play(stack, client, spec(11), kills=[stop], watch=watch)
    finally:
        stack.signal(part, signal.SIGCONT)
    # What woke up may have been asked to place the session too: it says the same, at one more epoch.
    assert [(event.data["node"], event.data["reason"]) for event in placed[:2]] == [
        ("node-1", "new"),
        ("node-2", "lost"),
    ]
    assert {event.data["node"] for event in placed[2:]} <= {"node-2"}
    assert placed[1].data["from"] == "node-1"
    assert_exact(played, calm)


async def test_the_pages_of_a_node_that_is_lost_are_taken_from_the_shared_store(stack, client):
    session = await client.sessions.create(system="Lost. " + LONG, limits={"max_think_tokens": 20}, seed=8)
    await session.run("One.")
    home = (await placements(session))[0][1]
    await shared(stack, home, session.id)
    stack.signal(home, signal.SIGSTOP)
    try:
        turn = await session.run("Two.")
    finally:
        stack.signal(home, signal.SIGCONT)
    assert [place[2] for place in await placements(session)] == ["new", "lost"]
    restored = next(event.data for event in turn.events if event.type == "kv.restored")
    assert restored["shared"] > 250
    await session.cancel()


async def test_a_node_that_is_drained_hands_its_sessions_over_with_their_pages(stack, client):
    idle = await client.sessions.create(system="Idle. " + LONG, limits={"max_think_tokens": 20}, seed=3)
    await idle.run("One.")
    assert (await idle.info()).state == "idle"
    running = await client.sessions.create(
        system="Runs. " + LONG, tools=[sleeper(6.0)], limits={"max_think_tokens": 60}, seed=4
    )
    await running.send("Wait.", tool_choice="required", max_tool_rounds=1)
    await reached(running, "tool.started")
    home = (await placements(running))[0][1]
    other = "node-2" if home == "node-1" else "node-1"
    if (await placements(idle))[0][1] != home:
        await idle.cancel()
    assert (await command(stack, "node", "drain", home, "--wait"))[0] == 0
    assert (await states(client))[home] == "drained"
    await reached(running, "session.idle")
    assert [(place[1], place[2]) for place in await placements(running)] == [(home, "new"), (other, "draining")]
    steps = await running.steps()
    assert [step["attempts"] for step in steps if step["kind"] == "tool"] == [1]
    assert steps[-1]["output"]["kv"]["shared"] > 250
    assert steps[-1]["output"]["kv"]["recomputed"] == 0
    assert "kv.offloaded" in {event.type for event in await running.events()}
    fresh = await client.sessions.create(limits={"max_think_tokens": 8}, seed=5)
    await fresh.run("One.")
    assert (await placements(fresh))[0][1] == other
    for session in (idle, running, fresh):
        await session.cancel()


async def test_an_idle_session_of_a_drained_node_moves_when_it_next_has_work(stack, client):
    session = await client.sessions.create(system="Moves. " + LONG, limits={"max_think_tokens": 20}, seed=6)
    await session.run("One.")
    home = (await placements(session))[0][1]
    await client.post(f"/v1/admin/nodes/{home}/drain")
    while (await states(client))[home] != "drained":
        await asyncio.sleep(0.1)
    assert len(await placements(session)) == 1
    turn = await session.run("Two.")
    assert [place[2] for place in await placements(session)] == ["new", "draining"]
    restored = next(event.data for event in turn.events if event.type == "kv.restored")
    assert restored["shared"] > 250
    assert of_think(turn)["recomputed"] == 0
    await session.cancel()


async def test_a_think_that_outlasts_its_node_goes_on_elsewhere_after_its_last_durable_token(stack, client):
    how = {"limits": {"max_think_tokens": 400}, "sampling": {"temperature": 1.2}, "seed": 7}
    undisturbed = await client.sessions.create(**how)
    await undisturbed.run("Write a very long story.")
    session = await client.sessions.create(**how)
    await session.send("Write a very long story.")
    await reached(session, "model.delta")
    home = (await placements(session))[0][1]
    stack.signal(home, signal.SIGTERM)
    await reached(session, "session.idle")
    assert await session.token_ids() == await undisturbed.token_ids()
    for one in (undisturbed, session):
        await one.cancel()


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """Processes that want all of the processor."""
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


async def test_a_busy_machine_moves_no_session(client):
    tools = [sleeper(0.3)]
    sessions = [
        await client.sessions.create(tools=tools, limits={"max_think_tokens": 40}, seed=20 + n) for n in range(4)
    ]
    with hogs(4):
        await asyncio.gather(*(session.run("Wait.", tool_choice="required", max_tool_rounds=2) for session in sessions))
    for session in sessions:
        assert len(await placements(session)) == 1
        assert {attempt["outcome"] for attempt in await session.attempts()} == {"completed"}
        assert [step["attempts"] for step in await session.steps()] == [1] * 6
        await session.cancel()


async def test_ended_sessions_hold_nothing_on_any_node(stack):
    while await left_in_stack(stack):  # a node that was stopped tidies up by itself, some seconds later
        await asyncio.sleep(0.5)
