"""Sandboxes that nobody uses at the moment: ready for whoever comes, and given up by whoever does not come back."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from runtime.node import reap
from runtime.steps import checkpoints
from runtime.steps.collecting import collect_all
from runtime.steps.resting import BUSY_TIMES, SpareBook, release_idle, usual_spec
from runtime.store import branches, fleet, sandboxes
from sandbox import Budget, Pool
from tests.runtime.tools.conftest import LIBRARIES, Node

pytestmark = [pytest.mark.sandbox, pytest.mark.model]
NOTE = ("bash", {"command": "echo kept >note; cat note"})


async def living(node: Node, boot: str = "boot") -> None:
    await fleet.register_node(node.db, "n", boot, "q", {"model": "m"}, {}, None)


def pooled(node: Node) -> Pool:
    s = node.services
    return Pool(s.driver, usual_spec((LIBRARIES,)), Budget(cold_start_s=0, most=2), SpareBook(s.db, s.node_id, s.boot))


async def rest(node: Node) -> None:
    """The session thinks: for as long as it likes."""
    await node.db.execute("UPDATE sessions SET state = 'thinking'")


async def ready(pool: Pool) -> None:
    async with asyncio.timeout(60):
        while not pool.figures().ready:
            await asyncio.sleep(0.01)


async def test_the_first_call_of_a_session_takes_a_spare_which_is_the_session_s_from_then_on(node: Node) -> None:
    await living(node)
    async with pooled(node) as pool:
        await ready(pool)
        spares = pool.spares()
        node = Node(dataclasses.replace(node.services, pool=pool))
        session = await node.session(["bash"])
        rows = await node.called(session, NOTE)
        assert [row["output"] for row in rows] == [b"kept\n"]
        [made] = await node.events(session, "sandbox.created")
        assert made["was_ready"] is True
        assert made["sandbox_id"] in spares
        kept = await node.db.fetch("SELECT sandbox_id FROM sandbox_spares")
        assert made["sandbox_id"] not in {row["sandbox_id"] for row in kept}
        await ready(pool)  # the next one
        assert await reap(node.db, node.services.driver) == []
    assert await node.services.driver.found() == [made["sandbox_id"]]


async def test_spares_of_a_life_that_is_over_are_reaped_and_those_of_a_living_node_are_not(node: Node) -> None:
    await living(node)
    driver, db = node.services.driver, node.db
    async with pooled(node) as pool:
        await ready(pool)
        await sandboxes.forget_spares(db, "another", "x")  # what another node of the machine does
        assert await reap(db, driver) == []
        await living(node, "next boot")
        await sandboxes.forget_spares(db, "another", "x")
        assert set(await reap(db, driver)) >= pool.spares()


async def test_a_sandbox_that_nobody_uses_goes_and_the_next_call_has_the_same_files(node: Node) -> None:
    session = await node.session(["bash"])
    await node.called(session, NOTE)
    assert await release_idle(node.services, 0) == 0  # the step still has it
    await rest(node)
    assert await release_idle(node.services, 3600) == 0
    assert await release_idle(node.services, 0) == 1
    assert await node.services.driver.found() == []
    [released] = await node.events(session, "sandbox.released")
    assert released["reason"] == "idle"
    assert await release_idle(node.services, 0) == 0
    owner = await node.place(session)
    await node.think(owner, ("bash", {"command": "cat note"}), step=4)
    await node.run(owner, step=5)
    assert (await node.ledger(session))[-1]["output"] == b"kept\n"


async def test_what_was_written_after_the_last_call_is_there_in_the_next_sandbox_and_not_after_a_rewind(
    node: Node,
) -> None:
    session = await node.session(["bash"])
    await node.called(session, ("bash", {"command": "(sleep 0.2; echo late >late) >/dev/null 2>&1 & echo up"}))
    await rest(node)
    owner = await node.place(session)
    sandbox = await node.sandbox(owner)
    while await sandbox.busy():
        await asyncio.sleep(0.01)
    await sandbox.close()
    assert await release_idle(node.services, 0) == 1
    assert await node.services.driver.found() == []
    root, _ = await checkpoints.last(node.db, session)
    left = await sandboxes.left(node.db, session, root)
    assert left != root
    await collect_all(node.services)
    await node.think(owner, ("bash", {"command": "cat late"}), step=4)
    await node.run(owner, step=5)
    assert (await node.ledger(session))[-1]["output"] == b"late\n"
    await rest(node)
    await node.db.run(lambda c: branches.rewind(c, session, 3, None, False))
    assert await sandboxes.left(node.db, session, root) == root


async def test_one_in_which_something_runs_is_given_more_time_but_not_for_ever(node: Node) -> None:
    session = await node.session(["bash"])
    await node.called(session, ("bash", {"command": "sleep 1000 >/dev/null 2>&1 & echo up"}))
    await node.db.execute("UPDATE tool_calls SET started_at = started_at - interval '100 s',"
                          " settled_at = settled_at - interval '100 s'")  # fmt: skip
    await rest(node)
    await node.db.execute("UPDATE sandboxes SET created_at = created_at - interval '100 s'")
    assert await release_idle(node.services, 50) == 0
    assert await release_idle(node.services, 100 / BUSY_TIMES) == 1
    assert await node.services.driver.found() == []


async def test_the_record_of_another_backend_s_sandbox_is_closed_and_the_sandbox_left_alone(node: Node) -> None:
    session = await node.session(["bash"])
    await node.called(session, NOTE)
    await rest(node)
    await node.db.execute("""UPDATE sandboxes SET driver = 'another', handle = handle || '{"driver": "another"}'""")
    assert await release_idle(node.services, 0) == 1
    assert await sandboxes.live(node.db) == set()
    assert len(await node.services.driver.found()) == 1
