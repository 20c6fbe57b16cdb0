"""A session as the tools of another agent, by the MCP library's own client."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from runtime.demo.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]


async def test_another_agent_works_through_a_session_and_finds_it_as_it_left_it(stack: Stack, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "TENUTO_API_URL": stack.api_url, "TENUTO_API_KEY": stack.api_key}
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "runtime.cli", "mcp", "--tool", "bash"], env=environment, cwd=tmp_path
    )
    async with stdio_client(server) as (reading, writing), ClientSession(reading, writing) as client:
        await client.initialize()

        async def call(tool: str, **arguments: Any) -> Any:
            answer = await client.call_tool(tool, arguments)
            assert not answer.is_error, answer.content
            return answer.structured_content

        assert {"work", "end"} <= {tool.name for tool in (await client.list_tools()).tools}
        first: Mapping[str, Any] = await call("work", task="Say hello.")
        session = first["session"]
        assert first["answer"]
        await call("write_file", session=session, path="word", text="tide")
        ran = await call("run_command", session=session, command="cat word; echo more > other")
        assert (ran["exit"], ran["output"]) == (0, "tide")
        assert (await call("read_file", session=session, path="other"))["result"] == "more\n"
        assert (await call("work", task="And now?", session=session))["session"] == session
        wrong = await client.call_tool("work", {"task": "x", "session": "ses_of_nobody"})
        assert wrong.is_error
        assert "no session" in json.dumps([part.model_dump(mode="json") for part in wrong.content])
        assert (await call("end", session=session))["result"] == "cancelled"
