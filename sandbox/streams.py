"""One connection of a tool, as the gate sees it: numbered frames of a link, read and written like a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from .proxy import MAX_HEAD

WINDOW = 1 << 17  # as in sandbox.agent.egress
PIECE = 1 << 16
Tell = Callable[[dict[str, Any], bytes], None]


class Stream:
    """`tell` sends a frame to the agent. After `reset` of either side, reading and writing raise ConnectionError."""

    def __init__(self, tell: Tell) -> None:
        self.reader = asyncio.StreamReader(limit=MAX_HEAD)
        self._tell = tell
        self._room = WINDOW
        self._more = asyncio.Event()
        self._gone = False

    def take(self, header: dict[str, Any], body: bytes) -> None:
        """A frame of the agent about this stream."""
        if self._gone:
            return
        if body:
            self.reader.feed_data(body)
        if header.get("end"):
            self.reader.feed_eof()
        self._room += int(header.get("room", 0))
        if header.get("gone"):
            self.end()
        self._more.set()

    def taken(self, count: int) -> None:
        """The agent may send as many bytes more."""
        self._tell({"room": count}, b"")

    async def delivered(self) -> None:
        """Returns when the tool has taken all that was written."""
        while self._room < WINDOW:
            self._more.clear()
            await self._more.wait()
            if self._gone:
                raise ConnectionResetError("the tool is gone")

    async def room(self) -> int:
        """How much may be written now, at least one byte."""
        while not self._room and not self._gone:
            self._more.clear()
            await self._more.wait()
        if self._gone:
            raise ConnectionResetError("the tool is gone")
        return self._room

    async def write(self, data: bytes) -> None:
        while data:
            size = min(PIECE, await self.room())
            piece, data = data[:size], data[size:]
            self._room -= len(piece)
            self._tell({}, piece)

    def write_eof(self) -> None:
        self._tell({"end": True}, b"")

    def reset(self) -> None:
        """Cut off on both sides, so that nothing unfinished looks complete."""
        if not self._gone:
            self._tell({"gone": True}, b"")
            self.end()

    def end(self) -> None:
        """Whoever reads or writes here learns that the other side is gone."""
        self._gone = True
        self.reader.set_exception(ConnectionResetError("the tool is gone"))
        self._more.set()
