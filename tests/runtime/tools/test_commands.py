"""Commands in the sandbox through the ledger: what a crash, a full store and a cancel may not do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from runtime.steps import Steps
from runtime.store import Database, ledger
from tests.runtime.tools.conftest import Node
from workflows.contract import StepIn

pytestmark = [pytest.mark.sandbox, pytest.mark.model]


def command(*argv: str, **more: Any) -> dict[str, Any]:
    return {"name": "do", "description": "Do it.", "command": list(argv), **more}


@pytest.mark.parametrize("effect", ["sandboxed", "unsafe"])
async def test_a_node_that_dies_between_a_tool_s_effect_and_its_record_does_not_run_it_twice(
    node: Node, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    session = await node.session([command("bash", "-c", "echo ran >>log; cat log", effect=effect)])
    owner = await node.take(session)
    await node.think(owner, ("do", {}))

    async def died(*_: Any) -> None:
        raise ConnectionError("the node is gone")

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "settle", died)
        with pytest.raises(ConnectionError):
            await node.run(owner)
    other = node.again()
    await other.run(await other.place(session))
    [row] = await node.ledger(session)
    assert (row["output"], row["status"], row["runs"]) == (b"ran\n", "settled", 1)


async def test_a_store_that_fails_after_the_tool_ran_has_its_write_repeated_and_not_the_tool(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await node.session([command("bash", "-c", "echo ran >>log; cat log")])
    owner = await node.take(session)
    await node.think(owner, ("do", {}))
    settled, settle = [], ledger.settle

    async def cut_off(db: Database, *rest: Any) -> None:
        """The server ends our connections as the outcome is written."""
        settled.append(1)
        await db.fetch("SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                       " WHERE datname = current_database() AND pid <> pg_backend_pid()")  # fmt: skip
        await settle(db, *rest)

    monkeypatch.setattr(ledger, "settle", cut_off)
    await node.run(owner)
    [row] = await node.ledger(session)
    assert (settled, row["output"], row["runs"]) == ([1], b"ran\n", 1)
    assert len(await node.events(session, "tool.settled")) == 1


@pytest.mark.parametrize("size", [5_000_000, 100_000_000])
async def test_what_a_tool_prints_without_measure_is_cut_at_its_source(node: Node, size: int) -> None:
    session = await node.session(
        [command("bash", "-c", f"head -c {size} /dev/zero; printf 'the \\377 end'")], limits={"tool_output_bytes": 4096}
    )
    [row] = await node.called(session, ("do", {}))
    assert len(row["output"]) < 4200
    assert b"bytes left out" in row["output"]
    assert row["output"].endswith(b"the \xff end")
    assert (row["result"]["stdout_bytes"], row["result"]["truncated"]) == (size + 9, True)


async def test_a_secret_in_a_tool_s_environment_is_told_to_the_tool_alone(node: Node) -> None:
    tool = command("bash", "-c", 'echo "$TOKEN" | tee kept; test "$TOKEN" = hunter22', env={"TOKEN": "hunter22"})
    session = await node.session([tool])
    [row] = await node.called(session, ("do", {}))
    assert (row["output"], row["result"]["code"]) == (b"***\n", 0)
    assert "hunter22" not in str(await node.events(session))


async def test_cancel_kills_the_whole_process_group(node: Node) -> None:
    session = await node.session([command("bash", "-c", "setsid sleep 600 & touch begun; sleep 600")])
    owner = await node.take(session)
    await node.think(owner, ("do", {}))
    env = ActivityEnvironment()
    running = asyncio.ensure_future(env.run(Steps(node.services).run_tools, StepIn(session, owner.epoch, 3)))
    while not await node.events(session, "sandbox.created"):
        await asyncio.sleep(0.01)
    sandbox = await node.sandbox(owner)
    while "begun" not in {entry.name for entry in await sandbox.list()}:
        await asyncio.sleep(0.01)
    env.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await sandbox.killall() == []
    await sandbox.close()
