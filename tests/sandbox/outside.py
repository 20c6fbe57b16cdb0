"""Servers in the test process that stand for the internet, and a name service that knows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from sandbox import Denial, Egress, Gate, Sandbox
from sandbox.allow import parse_allow

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Outside:
    """One server. `seen` is what it was sent, connection by connection; `ended` is set when one has ended."""

    port: int = 0
    seen: list[bytes] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def egress(self, allow: str = "", **names: Sequence[str]) -> Egress:
        """Allows `api.test` at this server, and what else is given; names are looked up in `names`."""
        known = {"api.test": ["127.0.0.1"], **{name.replace("_", "."): found for name, found in names.items()}}

        async def lookup(host: str, port: int) -> Sequence[str]:
            if host not in known:
                raise OSError(f"{host} is not known")
            return known[host]

        return Egress(parse_allow(f"api.test:{self.port},{allow}"), lookup, named="the test's list")


@asynccontextmanager
async def serving(talk: Talk | None = None) -> AsyncIterator[Outside]:
    """Answers each request with `hello`, or as `talk` does."""
    outside = Outside()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        outside.begun.set()
        try:
            if talk is not None:
                await talk(reader, writer)
            else:
                outside.seen.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
                outside.seen[-1] += await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            outside.ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    outside.port = server.sockets[0].getsockname()[1]
    try:
        yield outside
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Gives back what it is sent once that has ended."""
    writer.write(await reader.read())
    await writer.drain()


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers without an end."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()


class Proxy:
    """A sandbox without isolation, so that the tests themselves can be its tools."""

    def __init__(self, sandbox: Sandbox, stack: AsyncExitStack) -> None:
        self.sandbox = sandbox
        self.stack = stack
        self.denied: list[Denial] = []
        self.gate: Gate | None = None
        self.port = 0

    async def open(self, egress: Egress, head_s: float = 30.0) -> None:
        self.gate = Gate(self.sandbox.handle, self.sandbox.epoch, egress, self.denied.append, head_s)
        await self.gate.open()
        self.stack.push_async_callback(self.gate.close)
        call = await self.sandbox.start(f"port-{id(self.gate)}", ["printenv", "http_proxy"])
        self.port = int((await call.result()).output.rsplit(b":")[-1])

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.stack.callback(writer.close)
        return reader, writer

    async def say(self, data: bytes) -> bytes:
        """All that is answered to these bytes and no more; cut off: what had come by then."""
        reader, writer = await self.connect()
        writer.write(data)
        writer.write_eof()
        answer = b""
        try:
            while piece := await reader.read(65536):
                answer += piece
        except ConnectionError:
            answer += b"[reset]"
        writer.close()
        return answer
