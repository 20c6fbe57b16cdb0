"""Records histories of real sessions, for the tests to replay: `python -m tests.workflows.record`, or with names of
scenes for those only.

A session whose workflow code was changed must still replay what an earlier version of that code did, unless it is begun
anew. Run this when the code was changed on purpose, and keep what it writes with the change.
"""

from __future__ import annotations

import asyncio
import gzip
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import tenuto
from temporalio.client import Client

from runtime.demo import story
from runtime.demo.play import Kill, play
from runtime.demo.run import demo_environment
from runtime.demo.stack import Stack, running_stack
from tests.conftest import TEST_MODEL
from workflows.contract import workflow_id

HISTORIES = Path(__file__).parent / "histories"
WAIT: dict[str, Any] = {
    "name": "wait",
    "description": "Wait for a word.",
    "parameters": {"type": "object", "properties": {"word": {"enum": ["tide"]}}, "required": ["word"]},
    "command": ["sleep", "600"],
}


async def tool_rounds(stack: Stack, client: tenuto.AsyncClient) -> str:
    """Two messages and three tool rounds, to the end."""
    return (await play(stack, client, story.session(31, 0.8, long_s=0.5, short_s=0.2))).session_id


async def killed_node(stack: Stack, client: tenuto.AsyncClient) -> str:
    """A node that is lost in a think and another in a tool."""
    spec = story.session(32, 0.8, long_s=1.0, short_s=0.2)
    kills = [Kill("think", 2, 5, ("node",)), Kill("tool", 2, 0.3, ("engine",))]
    return (await play(stack, client, spec, kills=kills)).session_id


async def cancelled_in_a_tool(stack: Stack, client: tenuto.AsyncClient) -> str:
    session = await client.sessions.create(tools=[WAIT], limits={"max_think_tokens": 60}, seed=33)
    await session.send("Wait.", tool_choice="required", max_tool_rounds=1)
    async for event in session.stream():
        if event.type == "tool.started":
            break
    await session.cancel()
    return session.id


async def commanded(stack: Stack, client: tenuto.AsyncClient) -> str:
    """An approval, a pause in a think, an interrupt in a tool, a rewind."""
    tools = [{**WAIT, "name": "note", "command": ["true"]}, WAIT]
    session = await client.sessions.create(
        tools=tools, approvals={"note": {}}, limits={"max_think_tokens": 200}, sampling={"temperature": 0.8}, seed=3
    )
    await session.send("Note it.", tool_choice="note", max_tool_rounds=1)
    await session.until("waiting")
    await client.answer((await session.questions())[0].id, "approve")
    await session.until("idle")
    after = await session.position()
    await session.send("Tell me a long story about a ferry.", tool_choice="none")
    async for event in session.stream(after):
        if event.type == "model.delta":
            break
    await session.pause()
    await session.resume()
    await session.until("idle")
    after = await session.position()
    await session.send("Wait.", tool_choice="wait", max_tool_rounds=1)
    async for event in session.stream(after):
        if event.type == "tool.started":
            break
    await session.interrupt()
    await session.rewind(2, resume=True)
    await session.until("waiting")
    await session.cancel()
    return session.id


async def at_rest(stack: Stack, client: tenuto.AsyncClient) -> str:
    """A session that is open: what a release finds most of."""
    session = await client.sessions.create(limits={"max_think_tokens": 20}, seed=34)
    await session.run("One.")
    return session.id


async def changed_from_outside(stack: Stack, client: tenuto.AsyncClient) -> str:
    """A file before the first message, and commands between two, during one of which the node is lost."""
    session = await client.sessions.create(limits={"max_think_tokens": 20}, seed=35)
    await session.files.write("notes.txt", "one")
    await session.run("One.")
    await session.exec("cat notes.txt")
    after = await session.position()
    running = asyncio.create_task(session.exec("sleep 3; echo x >> ran"))
    async for event in session.stream(after):
        if event.type == "exec.started":
            break
    stack.kill("node")
    assert (await running).ok
    await session.run("Two.")
    await session.cancel()
    return session.id


SCENES: dict[str, Callable[[Stack, tenuto.AsyncClient], Awaitable[str]]] = {
    one.__name__: one
    for one in (tool_rounds, killed_node, cancelled_in_a_tool, commanded, at_rest, changed_from_outside)
}


async def record(*names: str) -> None:
    """Those of these names, or all."""
    home = Path(tempfile.mkdtemp(prefix="tenuto-record-"))
    try:
        async with running_stack(demo_environment(home, TEST_MODEL), lambda _: None) as stack:
            temporal = await Client.connect(stack.state()["temporal"])
            async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
                HISTORIES.mkdir(exist_ok=True)
                for name, scene in SCENES.items():
                    if names and name not in names:
                        continue
                    session_id = await scene(stack, client)
                    history = await temporal.get_workflow_handle(workflow_id(session_id)).fetch_history()
                    path = HISTORIES / f"{name}.json.gz"
                    path.write_bytes(gzip.compress(history.to_json().encode(), mtime=0))
                    print(f"{path.name}: {len(history.events)} events")
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    asyncio.run(record(*sys.argv[1:]))
