"""The gate of a sandbox: takes what its tools want to reach, and lets through what the lists allow.

It speaks over a link of its own, so that calls wait for nothing. A link that breaks is opened again as long as the
sandbox lives and nobody else has become its exit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from . import proxy, tls
from .client import REPLY_S, open_link, raise_refusal
from .egress import Denial, Egress
from .errors import EgressRefused, SandboxError, SandboxLost
from .link import Frame, Link
from .proxy import Answered, Asked
from .spec import Handle
from .streams import PIECE, WINDOW, Stream

HTTPS = 443
HEAD_S = 30.0
CONNECT_S = 15.0
LINGER_S = 5.0
Denied = Callable[[Denial], None]


class Gate:
    """Open with `await Gate(...).open()`, end with `close`, which cuts off what still runs. `denials` counts them."""

    def __init__(self, handle: Handle, epoch: int, egress: Egress, denied: Denied, head_s: float = HEAD_S) -> None:
        self.denials = 0
        self._handle = handle
        self._epoch = epoch
        self._egress = egress
        self._denied = denied
        self._head_s = head_s
        self._streams: dict[int, Stream] = {}
        self._served: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Gate:
        """Raises SandboxLost, StaleEpoch."""
        link, frames = await self._begin()
        self._task = asyncio.create_task(self._run(link, frames))
        return self

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def open_streams(self) -> int:
        return len(self._served)

    async def _begin(self) -> tuple[Link, asyncio.Queue[Frame | None]]:
        link = await open_link(self._handle)
        try:
            _, frames = link.ask({"op": "exit", "epoch": self._epoch})
            async with asyncio.timeout(REPLY_S):
                first = await frames.get()
            if first is None:
                raise SandboxLost("the agent went away before it took the exit")
            raise_refusal(first[0])
        except TimeoutError:
            await link.close()
            raise SandboxLost(f"the agent did not take the exit within {REPLY_S:.0f} s") from None
        except BaseException:
            await link.close()
            raise
        return link, frames

    async def _run(self, link: Link, frames: asyncio.Queue[Frame | None]) -> None:
        while True:
            try:
                replaced = await self._listen(link, frames)
            finally:
                for stream in self._streams.values():
                    stream.end()
                for task in self._served:
                    task.cancel()
                await asyncio.gather(*self._served, return_exceptions=True)
                await link.close()
            if replaced:
                return
            try:
                link, frames = await self._begin()
            except SandboxError:
                return

    async def _listen(self, link: Link, frames: asyncio.Queue[Frame | None]) -> bool:
        """Hands out frames until the link ends; True where another has become the exit."""
        while (frame := await frames.get()) is not None:
            header, body = frame
            number = int(header.get("stream", 0))
            if header.get("opened"):
                self._serve(link, number)
            elif number in self._streams:
                self._streams[number].take(header, body)
            elif "replaced" in header:
                return True
        return False

    def _serve(self, link: Link, number: int) -> None:
        def tell(header: dict[str, Any], body: bytes) -> None:
            link.send({"op": "relay", "epoch": self._epoch, "stream": number, **header}, body)

        stream = self._streams[number] = Stream(tell)
        task = asyncio.create_task(self._through(stream))
        self._served.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._served.discard(task)
            self._streams.pop(number, None)

        task.add_done_callback(over)

    async def _through(self, stream: Stream) -> None:
        """One connection from its first byte to its last. What goes wrong on the way is the tool's to see."""
        whole = False
        try:
            try:
                asked = await self._asked(stream)
                reader, writer = await self._reached(asked)
            except Answered as answered:
                await _answer(stream, answered)
            else:
                try:
                    await self._carry(stream, asked, reader, writer)
                finally:
                    writer.close()
            whole = True
        except* OSError:  # a timeout is one too
            pass
        finally:
            if not whole:
                stream.reset()

    async def _asked(self, stream: Stream) -> Asked:
        try:
            async with asyncio.timeout(self._head_s):
                head = await stream.reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise Answered(431, f"the head of the request is longer than {proxy.MAX_HEAD} bytes") from None
        except asyncio.IncompleteReadError:
            raise Answered(400, "the request ended before its head did") from None
        except TimeoutError:
            raise Answered(408, "the head of the request did not come in time") from None
        stream.taken(len(head))
        return proxy.parse(head)

    async def _reached(self, asked: Asked) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to an address that was looked at. Raises Answered."""
        try:
            addresses = await self._egress.addresses(asked.host, asked.port)
        except EgressRefused as refused:
            self._refuse(asked, str(refused))
            raise Answered(403, str(refused)) from None
        except (OSError, UnicodeError) as error:
            raise Answered(502, f"{asked.host}: {getattr(error, 'strerror', None) or error}") from None
        why = f"{asked.host} has no address"
        for address in addresses:
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await asyncio.open_connection(address, asked.port, limit=PIECE)
            except TimeoutError:
                why = f"{asked.host} does not answer on port {asked.port}"
            except OSError as error:
                why = f"{asked.host}: {error.strerror or error}"
        raise Answered(502, why)

    def _refuse(self, asked: Asked, reason: str) -> None:
        self.denials += 1
        self._denied(Denial(asked.host, asked.port, reason, time.time()))

    async def _carry(
        self, stream: Stream, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        tunnel = asked.body_bytes is None
        if tunnel:
            await stream.write(proxy.ESTABLISHED)
        writer.write(await self._hello(stream, asked) if tunnel and asked.port == HTTPS else asked.head)
        async with asyncio.TaskGroup() as group:
            out = group.create_task(_outwards(stream, writer, asked.body_bytes))
            while data := await reader.read(min(PIECE, await stream.room())):
                await stream.write(data)
            stream.write_eof()
            await stream.delivered()
            # A request has its answer; what the tool still sends is not for anybody. A tunnel may go on one way.
            async with asyncio.timeout(None if tunnel else LINGER_S):
                await out

    async def _hello(self, stream: Stream, asked: Asked) -> bytes:
        """The first record of a tunnel to the port of https: whoever asks there for another host is turned away."""
        try:
            async with asyncio.timeout(self._head_s):
                head = await stream.reader.readexactly(5)
                body = await stream.reader.readexactly(tls.record_bytes(head))
            name = tls.server_name(body)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the tool went before it said hello") from None
        except tls.NotTls:
            self._refuse(asked, f"what was sent to {asked.host} is not TLS; use another port than {HTTPS} for it")
            raise ConnectionResetError("refused") from None
        if name not in (None, asked.host):
            self._refuse(asked, f"what was sent to {asked.host} asks it for another host, {name}")
            raise ConnectionResetError("refused")
        stream.taken(len(head) + len(body))
        return head + body


async def _answer(stream: Stream, answered: Answered) -> None:
    """Says it and lets the tool end: closing at once would lose the answer of one that still sends."""
    await stream.write(answered.as_bytes())
    stream.write_eof()
    async with asyncio.timeout(LINGER_S):
        while data := await stream.reader.read(WINDOW):
            stream.taken(len(data))


async def _outwards(stream: Stream, writer: asyncio.StreamWriter, limit: int | None) -> None:
    """What the tool says, up to `limit` bytes: what comes after them goes nowhere."""
    listens = True
    while data := await stream.reader.read(PIECE):
        piece = data if limit is None else data[:limit]
        limit = None if limit is None else limit - len(piece)
        try:
            if listens and piece:
                writer.write(piece)
                await writer.drain()
        except OSError:
            listens = False  # what it has said by now is still to be heard
        stream.taken(len(data))
    if limit:
        raise ConnectionResetError("the tool went in the middle of its request")
    with suppress(OSError):
        writer.write_eof()
