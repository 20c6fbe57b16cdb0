"""MCP servers at a URL: a real process that speaks streamable HTTP, listed by its address and port."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from runtime.errors import InvalidRequest
from tests.runtime.tools import servers
from tests.runtime.tools.conftest import Node

pytestmark = [pytest.mark.sandbox, pytest.mark.model]


@pytest_asyncio.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """host:port of the server; it is there when the file with its port is."""
    port_file = tmp_path / "port"
    program = Path(servers.__file__).with_name("mcp_server.py")
    env = {"SECRET_WORD": "hunter22", "COUNT_FILE": str(tmp_path / "counted")}
    process = await asyncio.create_subprocess_exec(sys.executable, str(program), "http", str(port_file), env=env)
    try:
        async with asyncio.timeout(60):
            while not port_file.exists() and process.returncode is None:
                await asyncio.sleep(0.02)
        yield f"127.0.0.1:{port_file.read_text()}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def remote(address: str, **more: object) -> dict[str, object]:
    return {"type": "mcp", "name": "far", "url": f"http://{address}/mcp", **more}


async def test_its_tools_are_listed_and_called_without_a_sandbox(node: Node, address: str) -> None:
    node = node.allowing(address)
    session = await node.session([remote(address, tools=["add", "again", "picture", "long"])])
    rows = await node.called(
        session,
        ("far__add", {"a": 2, "b": 3}),
        ("far__picture", {}),
        ("far__add", {"a": "x"}),
        ("far__long", {"characters": 50_000}),
    )
    assert [row["output"] for row in rows[:2]] == [b"2 + 3 = 5", b"[image/png, 300 bytes]"]
    assert [row["result"]["reason"] for row in rows] == ["ok", "ok", "error", "ok"]
    assert rows[3]["result"]["truncated"]
    assert {row["effect"] for row in rows} == {"unsafe"}
    assert await node.events(session, "sandbox.%") == []
    [listed] = await node.events(session, "tools.listed")
    assert listed["tools"] == ["far__add", "far__again", "far__picture", "far__long"]


async def test_one_that_is_not_listed_or_not_there_fails_the_message_in_a_sentence(node: Node, address: str) -> None:
    session = await node.session([remote(address)])
    with pytest.raises(InvalidRequest, match=r"'far' did not say what it offers: .*TENUTO_EGRESS_ALLOW"):
        await node.take(session)
    nobody = node.allowing("127.0.0.1:1")
    session = await nobody.session([remote("127.0.0.1:1")])
    with pytest.raises(InvalidRequest, match="'far' did not say what it offers"):
        await nobody.take(session)


async def test_one_that_is_gone_when_it_is_called_is_told_of(node: Node, address: str) -> None:
    there = node.allowing(address)
    session = await there.session([remote(address)])
    owner = await there.take(session)
    await there.think(owner, ("far__add", {"a": 1, "b": 2}), ("far__hang", {}))
    await node.run(owner)  # a node whose list is empty
    rows = await node.ledger(session)
    assert [row["result"]["reason"] for row in rows] == ["refused", "refused"]


async def test_a_call_that_is_not_answered_in_time_ends(node: Node, address: str) -> None:
    node = node.allowing(address)
    session = await node.session([remote(address, timeout_s=2.0)])
    [row] = await node.called(session, ("far__hang", {}))
    assert row["result"]["reason"] == "timeout"
