"""An MCP server at a URL, over streamable HTTP."""

from __future__ import annotations

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from runtime.tools.egress import Egress, client, place_of
from runtime.tools.kinds import McpTool, texts
from runtime.tools.mcp import ABOUT_US, McpFault, T, Work, attempt, fault_of
from sandbox import EgressRefused

MAX_ANSWER_BYTES = 4 << 20
GRACE_S = 5.0


class OutsideServer:
    """One connection for each time that it is spoken with. Raises EgressRefused where the list does not allow it."""

    def __init__(self, egress: Egress, tool: McpTool) -> None:
        assert tool.url is not None
        self._egress = egress
        self._tool = tool
        self._url = tool.url

    async def speak(self, work: Work[T], *, speaker: str, again: bool = False) -> T:
        await self._reachable()
        try:
            value = await self._spoken(work)
        except BaseExceptionGroup as group:
            value = _fault(_first(group))
        except (MCPError, httpx2.HTTPError, OSError) as error:
            value = _fault(error)
        if isinstance(value, McpFault):
            raise value
        return value

    async def _reachable(self) -> None:
        host, port = place_of(httpx2.URL(self._url))
        try:
            await self._egress.addresses(host, port)
        except OSError as error:
            raise McpFault("unreachable", f"{host}: {error.strerror or error}") from None

    async def _spoken(self, work: Work[T]) -> T | McpFault:
        # The protocol's own timeout is to end a call that takes too long, so the connection's is longer.
        http = client(self._egress, texts(self._tool.headers), self._tool.timeout_s + GRACE_S, MAX_ANSWER_BYTES)
        transport = streamable_http_client(self._url, http_client=http, max_sse_event_size=MAX_ANSWER_BYTES)
        async with (
            http,
            Client(transport, client_info=ABOUT_US, read_timeout_seconds=self._tool.timeout_s) as spoken,
        ):
            return await attempt(work, spoken.session, self._tool.timeout_s)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fault(error: BaseException) -> McpFault:
    if isinstance(error, EgressRefused) or not isinstance(error, Exception):
        raise error
    if isinstance(error, MCPError):
        return fault_of(error)
    return McpFault("unreachable", f"{type(error).__name__}: {error}")
