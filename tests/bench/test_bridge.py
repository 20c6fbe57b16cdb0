"""The bridge passes bytes while it stands, and tells both ends when it is cut or one of them goes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

from bench.bridge import Bridge, Streams


@contextlib.asynccontextmanager
async def bridged() -> AsyncIterator[tuple[Bridge, asyncio.Queue[Streams]]]:
    """A bridge to a server that hands over each connection that reaches it."""
    arrived: asyncio.Queue[Streams] = asyncio.Queue()
    server = await asyncio.start_server(lambda *ends: arrived.put_nowait(ends), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Bridge(lambda: asyncio.open_connection("127.0.0.1", port)).open() as bridge:
        yield bridge, arrived
    server.close()


async def test_bytes_go_both_ways_and_an_end_is_passed_on() -> None:
    async with bridged() as (bridge, arrived):
        reader, writer = await asyncio.open_connection("127.0.0.1", bridge.port)
        there_reader, there_writer = await arrived.get()
        writer.write(b"ask")
        writer.write_eof()
        assert await there_reader.read() == b"ask"
        there_writer.write(b"answer")
        there_writer.close()
        assert await reader.read() == b"answer"
        writer.close()


async def test_a_cut_ends_what_runs_and_refuses_what_comes_until_it_is_mended() -> None:
    async with bridged() as (bridge, arrived):
        reader, writer = await asyncio.open_connection("127.0.0.1", bridge.port)
        there_reader, there_writer = await arrived.get()
        bridge.cut()
        for end in (reader, there_reader):
            with contextlib.suppress(ConnectionResetError):
                assert await end.read() == b""
        refused, refused_writer = await asyncio.open_connection("127.0.0.1", bridge.port)
        with contextlib.suppress(ConnectionResetError):
            assert await refused.read() == b""
        assert arrived.empty()
        bridge.mend()
        _, again = await asyncio.open_connection("127.0.0.1", bridge.port)
        _, there_again = await arrived.get()
        for end in (writer, there_writer, refused_writer, again, there_again):
            end.close()


async def test_the_other_end_is_told_of_one_that_vanishes() -> None:
    async with bridged() as (bridge, arrived):
        _, writer = await asyncio.open_connection("127.0.0.1", bridge.port)
        there_reader, there_writer = await arrived.get()
        reset = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.transport.abort()
        with contextlib.suppress(ConnectionResetError):
            assert await there_reader.read() == b""
        there_writer.close()
