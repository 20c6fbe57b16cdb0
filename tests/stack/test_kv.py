"""Where KV waits in a running stack, and what the operator can ask about it."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from runtime.demo.stack import Stack
from tests.stack.test_sessions import sleeper

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]


async def command(stack: Stack, *arguments: str) -> tuple[int, str]:
    """`tenuto kv …` as an operator of this installation types it: exit status and output."""
    environment = {**os.environ, "TENUTO_HOME": str(stack.settings.home), "TENUTO_API_URL": stack.api_url}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "runtime.cli", "kv", *arguments, stdout=asyncio.subprocess.PIPE, env=environment
    )
    out, _ = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode()


async def settled(client, session: str, action: str) -> list[dict]:
    """The decisions about a session, once one of this kind is settled: the log is taken over now and then."""
    while True:
        rows = (await client.get(f"/v1/sessions/{session}/kv/decisions", {"limit": 1000}))["data"]
        if any(row["action"] == action and row["status"] != "open" for row in rows):
            return rows
        await asyncio.sleep(0.1)


async def test_the_policy_copies_when_a_tool_starts_and_the_log_says_why(client, stack):
    session = await client.sessions.create(
        system="tide " * 200 + "auto", tools=[sleeper(0.5)], limits={"max_think_tokens": 60}, seed=5
    )
    turn = await session.run("Wait.", tool_choice="required", max_tool_rounds=1)
    offloaded = [event.data for event in turn.events if event.type == "kv.offloaded"]
    assert [data["tier"] for data in offloaded] == ["host"]
    rows = await settled(client, session.id, "store")
    stored = next(row for row in rows if row["action"] == "store")
    assert (stored["reason"], stored["place"], stored["step"]) == ("tool_started", "host", 3)
    assert stored["tokens"] > 0  # what was not written behind while the think decoded
    assert stored["realised_s"] > 0
    status, text = await command(stack, "explain", session.id)
    assert status == 0
    assert "to host memory, because a tool started" in text
    status, lines = await command(stack, "explain", session.id, "--json")
    assert [json.loads(line)["id"] for line in lines.splitlines()] == [row["id"] for row in rows]
    await session.cancel()


async def test_a_session_that_nobody_knows_cannot_be_explained(stack):
    status, _ = await command(stack, "explain", "ses_nobody")
    assert status == 1


async def test_the_log_outlives_the_engine_that_wrote_it(client, stack):
    session = await client.sessions.create(
        system="tide " * 200 + "killed", tools=[sleeper(2.0)], limits={"max_think_tokens": 60}, seed=6
    )
    await session.send("Wait.", tool_choice="required", max_tool_rounds=1)
    await settled(client, session.id, "store")
    stack.kill("engine")
    async for event in session.stream():
        if event.type == "session.idle":
            break
    # Whichever comes first, the end of the pause or the think, reads them back; the log may tell of it in two lines.
    back: list[dict] = []
    while sum(row["tokens"] for row in back) <= 200:
        rows = (await client.get(f"/v1/sessions/{session.id}/kv/decisions", {"limit": 1000}))["data"]
        back = [row for row in rows if row["action"] in ("prefetch", "restore") and row["status"] == "done"]
        await asyncio.sleep(0.1)
    assert len({row["id"].partition(":")[0] for row in rows}) == 2  # two engines
    assert {row["place"] for row in back} == {"host"}
    await session.cancel()


async def test_the_audit_finds_disk_memory_and_record_in_agreement(client, stack):
    session = await client.sessions.create(
        system="tide " * 200 + "audit", tools=[sleeper(0.2)], limits={"max_think_tokens": 60}, kv={"on_tool": "nvme"}
    )
    await session.run("Wait.", tool_choice="required", max_tool_rounds=1)
    status, text = await command(stack, "audit", "--json")
    found = json.loads(text)
    assert (status, found["clean"], found["orphans"]) == (0, True, {}), found
    assert found["verified"] > 0
    await session.cancel()
    status, text = await command(stack, "audit")
    assert status == 0
    assert "is named by an open session" in text


async def test_a_session_that_shares_with_nobody_finds_nothing_of_its_twin(client, stack):
    spec = {"system": "tide " * 200 + "private", "limits": {"max_think_tokens": 8}, "seed": 7}
    found = []
    for share in ("session", "session", "tenant", "tenant"):
        session = await client.sessions.create(**spec, kv={"share": share})
        await session.run("Say tide.", tool_choice="none")
        think = [step for step in await session.steps() if step["kind"] == "think"][-1]
        found.append(think["output"]["kv"]["device"])
    assert found[:3] == [0, 0, 0]
    assert found[3] > 200
    for info in [info async for info in client.sessions.list(limit=4)][:4]:
        await (await client.sessions.get(info.id)).cancel()
