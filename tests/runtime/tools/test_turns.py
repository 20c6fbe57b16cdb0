"""Sandboxes of a tenant that may have no more: the next one waits for its turn, and says so once."""

from __future__ import annotations

import asyncio

import asyncpg

from runtime.steps.boxes import release_box
from runtime.steps.resting import release_idle
from runtime.store import fleet, tenants
from runtime.store.events import CHANNEL
from tests.runtime.tools.conftest import Node

CALL = ("echo", {})
TOOL = {"name": "echo", "description": "Echo.", "command": ["echo", "tide"]}


async def waiting(node: Node, session_id: str, running: asyncio.Task[object]) -> None:
    """Until the session has said that it waits."""
    told = asyncio.Event()
    connection = await asyncpg.connect(node.db.dsn)
    try:
        await connection.add_listener(CHANNEL, lambda *_: told.set())
        while not await node.events(session_id, "sandbox.waiting"):
            assert not running.done(), running
            await told.wait()
            told.clear()
    finally:
        await connection.close()


async def test_a_session_waits_until_another_of_its_tenant_gives_its_sandbox_up(node: Node) -> None:
    quota = {"sandboxes": 1}
    await node.db.run(lambda c: tenants.set_quotas(c, fleet.DEFAULT_TENANT, quota))
    first, second, third = [await node.session([TOOL]) for _ in range(3)]
    await node.called(first, CALL)
    running = asyncio.create_task(node.called(second, CALL))
    await waiting(node, second, running)
    assert await release_box(node.services, first)
    (call,) = await running
    assert call["output"] == b"tide\n"
    (told,) = await node.events(second, "sandbox.waiting")
    assert (told["quota"], told["used"], told["limit"]) == ("sandboxes", 1, 1)
    # one that stands idle is given up at once for one that waits
    await node.db.execute("UPDATE sessions SET state = 'idle' WHERE session_id = $1", second)
    assert await release_idle(node.services, 3600) == 0
    running = asyncio.create_task(node.called(third, CALL))
    await waiting(node, third, running)
    assert await release_idle(node.services, 3600) == 1
    await running
    assert await node.db.fetch("SELECT FROM sandbox_turns") == []
    await release_box(node.services, third)


async def test_a_step_that_is_stopped_while_it_waits_leaves_the_queue(node: Node) -> None:
    await node.db.run(lambda c: tenants.set_quotas(c, fleet.DEFAULT_TENANT, {"sandboxes": 1}))
    first, second = [await node.session([TOOL]) for _ in range(2)]
    await node.called(first, CALL)
    running = asyncio.create_task(node.called(second, CALL))
    await waiting(node, second, running)
    running.cancel()
    await asyncio.wait([running])
    assert await node.db.fetch("SELECT FROM sandbox_turns") == []
    assert [row["session_id"] for row in await node.db.fetch("SELECT session_id FROM sandboxes")] == [first]
    await release_box(node.services, first)
