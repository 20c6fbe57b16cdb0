"""Tools of other kinds through the SDK, against the whole stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.tools import servers

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

PROGRAM = Path(servers.__file__).with_name("mcp_server.py").read_text()
LIMITS = {"max_think_tokens": 80}


def near(name: str) -> dict:
    """The MCP server in the sandbox; it leaves its marks on a volume, where the test sees them."""
    marks = {"COUNT_FILE": f"/mnt/outside/{name}.counted", "GO_FILE": f"/mnt/outside/{name}.go"}
    command = ["env", "PYTHONPATH=/mnt/libs", "python3", "/work/server.py", "stdio"]
    return {"type": "mcp", "name": "near", "command": command, "env": marks, "tools": ["wait"]}


async def test_a_request_goes_to_the_listed_host_and_its_answer_to_the_model(client, stack, web):
    parameters = {"type": "object", "properties": {"id": {"enum": ["tide"]}}, "required": ["id"]}
    tool = {
        "type": "http", "name": "ask", "description": "Ask.", "url": f"{web.url}/items/{{id}}",
        "parameters": parameters, "headers": {"X-Token": "s3cr3t-t0ken"},
    }  # fmt: skip
    session = await client.sessions.create(tools=[tool], limits=LIMITS, seed=1)
    turn = await session.run("Ask for tide.", tool_choice="required", max_tool_rounds=1)
    [call] = turn.tool_calls
    assert (call["reason"], call["code"]) == ("http", 200)
    assert "/items/tide" in call["preview"]
    assert web.requests[-1]["headers"]["X-Token"] == "s3cr3t-t0ken"
    assert "s3cr3t-t0ken" not in str([event.data for event in turn.events])
    for log in stack.settings.logs_dir.iterdir():
        text = log.read_bytes()
        assert (b"s3cr3t-t0ken" in text, b"/items/tide" in text) == (False, False), log
    await session.cancel()


async def test_a_server_in_the_sandbox_outlives_the_node_that_asked_it_and_is_asked_once(client, stack):
    outside = stack.settings.home.parent / "outside"
    session = await client.sessions.create(tools=[near("killed")], files={"server.py": PROGRAM}, limits=LIMITS, seed=2)
    await session.send("Wait.", tool_choice="near__wait", max_tool_rounds=1)
    settled = []
    async for event in session.stream():
        if event.type == "tool.started":
            await stack.restarted("node", stack.kill("node"))
            (outside / "killed.go").touch()
        elif event.type == "tool.settled":
            settled.append(event.data)
        elif event.type in ("session.idle", "session.failed"):
            break
    assert [(each["reason"], each["preview"]) for each in settled] == [("ok", "waited 1")]
    assert (outside / "killed.counted").read_text() == "waited\n"
    await session.cancel()
