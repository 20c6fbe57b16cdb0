"""A TCP proxy between two parts of a stack that can be cut: every connection ends at once, and no new one is taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_CHUNK = 1 << 16


class Bridge:
    """Listens on 127.0.0.1:`port` and passes bytes to wherever `reach` connects."""

    def __init__(self, reach: Callable[[], Awaitable[Streams]]) -> None:
        self._reach = reach
        self._is_cut = False
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Bridge]:
        server = await asyncio.start_server(self._arrived, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._is_cut = True
        for writer in self._ends:
            writer.transport.abort()

    def mend(self) -> None:
        self._is_cut = False

    async def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            there = None if self._is_cut else await self._reach()
        except OSError:
            there = None
        if there is None:
            writer.transport.abort()
            return
        ends = (writer, there[1])
        self._ends.update(ends)
        try:
            if not self._is_cut:  # it may have been cut while the other end was reached
                with contextlib.suppress(OSError):  # one end is gone, so the other is told
                    await asyncio.gather(_pass(reader, there[1]), _pass(there[0], writer))
        finally:
            self._ends.difference_update(ends)
            for end in ends:
                end.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
