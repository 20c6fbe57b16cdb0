"""An MCP server whose tools are a session: another agent works through it, and finds it as it left it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tenuto
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

_ABOUT = (
    "A durable agent session with a sandbox of its own. Give it a task with `work`; it answers when its turn is over,"
    " and keeps files and memory until you `end` it."
)


def mcp_server(client: tenuto.AsyncClient, *, agent: str | None = None, tools: Sequence[str] = ()) -> MCPServer[Any]:
    """`agent`: what its sessions are made of, `name` or `name@3`; `tools`: built-in ones, where none is named."""
    server: MCPServer[Any] = MCPServer("tenuto", instructions=_ABOUT)

    @contextlib.contextmanager
    def refusals() -> Iterator[None]:
        """What is refused is said to the other agent, in its words."""
        try:
            yield
        except tenuto.APIError as error:
            raise ToolError(str(error)) from error

    async def found(session: str | None) -> tenuto.AsyncSession:
        if session is not None:
            return await client.sessions.get(session)
        return await client.sessions.create(agent=agent, tools=list(tools) or None)

    @server.tool()
    async def work(task: str, session: str | None = None) -> dict[str, str]:
        """Give a session a task and wait for its answer. Without `session` a new one begins; with the id that an
        earlier call gave, that one goes on, with its files and all that was said."""
        with refusals():
            given = await found(session)
            turn = await given.run(task)
        return {"session": given.id, "outcome": turn.outcome, "answer": turn.text}

    @server.tool()
    async def run_command(session: str, command: str) -> dict[str, Any]:
        """Run a shell command in the session's sandbox, as a step of it."""
        with refusals():
            ran = await (await client.sessions.get(session)).exec(command)
        return {"exit": ran.exit, "reason": ran.reason, "output": ran.output}

    @server.tool()
    async def read_file(session: str, path: str) -> str:
        """A file of the session's workspace, as text."""
        with refusals():
            return (await (await client.sessions.get(session)).files.read(path)).decode("utf-8", "replace")

    @server.tool()
    async def write_file(session: str, path: str, text: str) -> str:
        """Put a file into the session's workspace."""
        with refusals():
            await (await client.sessions.get(session)).files.write(path, text)
        return path

    @server.tool()
    async def end(session: str) -> str:
        """End a session: its sandbox and its pages are freed. What was said stays on record."""
        with refusals():
            return (await (await client.sessions.get(session)).cancel()).state

    return server
