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


async def test_a_shell_stays_between_the_calls_of_a_session_and_says_where_it_is_new(node: Node) -> None:
    session = await node.session(["shell"])
    owner = await node.take(session)
    await node.think(
        owner, ("shell", {"command": "mkdir d; cd d; x=7"}), ("shell", {"command": "pwd; echo $x; exit 3"})
    )
    await node.run(owner)
    first, second = await node.ledger(session)
    assert (first["output"], first["result"]["note"]) == (b"", "in a new shell")
    assert (second["output"], second["result"]["code"]) == (b"/work/d\n7\n", 3)
    assert second["result"]["note"] == "the shell ended with it; the next call begins in a new one"
    assert first["snapshot_after"] != first["snapshot_before"]


async def test_what_a_tool_leaves_in_the_background_is_told_and_stays_only_where_that_was_asked(node: Node) -> None:
    left = "sleep 1000 >/dev/null 2>&1 & echo up"
    session = await node.session(["bash", command("bash", "-c", left)])
    owner = await node.take(session)
    await node.think(owner, ("bash", {"command": left}), ("do", {}))
    await node.run(owner)
    kept, ended = await node.ledger(session)
    assert kept["result"]["note"] == "1 process in the background still running"
    assert ended["result"]["note"] == "1 process in the background ended with the call"


async def test_a_secret_is_masked_before_it_leaves_the_sandbox(node: Node) -> None:
    show = command(
        "bash", "-c", "echo $TOKEN; echo -n $TOKEN | base64; echo $LEVEL", env={"TOKEN": "hunter22-x", "LEVEL": "3"}
    )
    session = await node.session([show])
    owner = await node.take(session)
    await node.think(owner, ("do", {}))
    await node.run(owner)
    [row] = await node.ledger(session)
    assert row["output"].splitlines()[0] == b"***"
    assert b"aHVudGVyMjIteA" not in row["output"]
    assert row["output"].splitlines()[-1] == b"3"
