"""What MCP servers offer, and calls of it, wherever the server is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import httpx2
import mcp_types
from mcp import MCPError
from mcp.client import ClientSession
from pydantic import ValidationError

from runtime.tools.outcome import Outcome, capped

MAX_PAGES = 20
CALL_KEY = "tenuto.dev/callKey"  # in a call's _meta: the same for every run of one call
ABOUT_US = mcp_types.Implementation(name="tenuto", version="0.1.0")
T = TypeVar("T")
Work = Callable[[ClientSession], Awaitable[T]]


class McpFault(Exception):
    """The server could not be spoken with. `reason` is that of an Outcome."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Server(Protocol):
    """Somewhere an MCP server answers."""

    async def speak(self, work: Work[T], *, speaker: str, again: bool = False) -> T:
        """Connects, does the work, and leaves. Raises McpFault, and whatever tells of a lost sandbox.

        `speaker` names what this is for; `again`: somebody spoke under this name before, and may have been heard.
        """
        ...


async def listed(server: Server, speaker: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The server's part of the handshake and its tools, as plain JSON. Raises McpFault."""

    async def work(session: ClientSession) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        tools: list[mcp_types.Tool] = []
        cursor = None
        for _ in range(MAX_PAGES):
            params = mcp_types.PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await session.list_tools(params=params)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        hello = session.initialize_result
        greeted = hello.model_dump(mode="json", by_alias=True, exclude_none=True) if hello else {}
        return greeted, [_plain(tool) for tool in tools]

    return await server.speak(work, speaker=speaker)


def _plain(tool: mcp_types.Tool) -> dict[str, Any]:
    described = tool.description or tool.title or tool.name
    return {"name": tool.name, "description": described[:2000], "parameters": tool.input_schema}


async def called(
    server: Server, tool: str, arguments: Mapping[str, Any], *, key: str, again: bool, limit_bytes: int
) -> Outcome:
    """Calls a tool under the key of the call; all that the server can do wrong is an outcome."""
    params = mcp_types.CallToolRequestParams.model_validate(
        {"name": tool, "arguments": dict(arguments), "_meta": {CALL_KEY: key}}
    )

    async def work(session: ClientSession) -> mcp_types.CallToolResult:
        # Not `call_tool`: that one would list the tools again, to look at what is only for programs.
        return await session.send_request(mcp_types.CallToolRequest(params=params), mcp_types.CallToolResult)

    try:
        result = await server.speak(work, speaker=key, again=again)
    except McpFault as fault:
        return Outcome(fault.reason, None, str(fault).encode(errors="replace")[:limit_bytes])
    text = _as_text(result).encode(errors="replace")
    output, truncated = capped(text, limit_bytes, len(text))
    return Outcome("error" if result.is_error else "ok", None, output, truncated)


def _as_text(result: mcp_types.CallToolResult) -> str:
    """Text as it is; of everything else, what it is and how long."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_block(block) for block in result.content)


def _block(block: mcp_types.ContentBlock) -> str:
    if isinstance(block, mcp_types.TextContent):
        return block.text
    if isinstance(block, mcp_types.ImageContent | mcp_types.AudioContent):
        return f"[{block.mime_type}, {_decoded_bytes(block.data)} bytes]"
    if isinstance(block, mcp_types.ResourceLink):
        return f"[{block.mime_type or 'resource'} at {block.uri}]"
    inner = block.resource
    if isinstance(inner, mcp_types.TextResourceContents):
        return inner.text
    return f"[{inner.mime_type or 'resource'} at {inner.uri}, {_decoded_bytes(inner.blob)} bytes]"


def _decoded_bytes(data: str) -> int:
    return len(data) * 3 // 4 - data[-2:].count("=")


def fault_of(error: MCPError) -> McpFault:
    if error.code == mcp_types.REQUEST_TIMEOUT:
        return McpFault("timeout", "no answer came in time")
    if error.code == mcp_types.CONNECTION_CLOSED:
        return McpFault("server_ended", "the connection ended before the answer came")
    return McpFault("error", f"{error.message} (code {error.code})")


async def attempt(work: Work[T], session: ClientSession, timeout_s: float) -> T | McpFault:
    """The work's value, or why there is none: raised inside a task group it would come out wrapped."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work(session)
    except TimeoutError:
        return McpFault("timeout", "no answer came in time")
    except MCPError as error:
        return fault_of(error)
    except (ValidationError, RuntimeError) as error:
        return McpFault("error", f"the server does not keep to the protocol: {error}")
    except httpx2.HTTPError as error:
        return McpFault("unreachable", f"{type(error).__name__}: {error}")
