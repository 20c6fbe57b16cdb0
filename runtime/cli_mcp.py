"""`tenuto mcp`: sessions as the tools of an MCP server, over standard input and output."""

from __future__ import annotations

import asyncio

import click
import tenuto

from runtime.mcp_face import mcp_server


@click.command("mcp")
@click.option("--agent", metavar="NAME", help="What its sessions are made of; NAME or NAME@3.")
@click.option("--tool", "tools", multiple=True, metavar="NAME", help="A built-in tool of theirs; may be repeated.")
def mcp(agent: str | None, tools: tuple[str, ...]) -> None:
    """Serve sessions to another agent as the tools of an MCP server, over standard input and output."""

    async def serve() -> None:
        async with tenuto.AsyncClient() as client:
            await mcp_server(client, agent=agent, tools=tools).run_stdio_async()

    asyncio.run(serve())
