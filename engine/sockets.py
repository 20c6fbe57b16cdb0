"""Sockets that speak the token-level protocol, whoever answers behind them.

A slow or vanished reader costs the one who answers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections import deque
from pathlib import Path
from typing import Any

from engine.errors import EngineError, RequestError, ServerUnavailable
from engine.wire import ModelCard, encode_frame, read_frame

Frame = dict[str, Any]
MAX_QUEUED_FRAMES = 4096
MAX_CALLS_PER_CONNECTION = 256


class Connection:
    """One client. Frames out are queued; token frames of one generation merge while they wait."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.requests: dict[str, Any] = {}  # by request_id, what may end one
        self.preparing: dict[str, asyncio.Event] = {}  # set when the request has been handed to the core, or refused
        self._writer = writer
        self._queue: deque[Frame] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def push(self, frame: Frame) -> None:
        """Queue one frame (on the event loop). A reader that lets thousands of frames pile up is cut off."""
        if self._closed:
            return
        last = self._queue[-1] if self._queue else None
        if last is not None and frame.get("type") == last.get("type") == "tokens" and frame["id"] == last["id"]:
            last["ids"] = [*last["ids"], *frame["ids"]]
            if "logprobs" in frame:
                last["logprobs"] = [*last["logprobs"], *frame["logprobs"]]
            return
        if len(self._queue) >= MAX_QUEUED_FRAMES:
            self.abort()
            return
        self._queue.append(frame)
        self._wake.set()

    def abort(self) -> None:
        self._closed = True
        self._wake.set()
        self._writer.transport.abort()

    async def write_queued(self) -> None:
        """Until the connection ends."""
        with contextlib.suppress(ConnectionError):
            while not self._closed:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    self._writer.write(encode_frame(self._queue.popleft()))
                    await self._writer.drain()


class FrameServer:
    """Reads calls from connections and hands each to `dispatch`; what is raised there is told to whoever asked."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self._servers: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
        self._socket: Path | None = None

    async def dispatch(self, connection: Connection, call_id: Any, message: Frame) -> None:
        """Answer one call. Raises EngineError."""
        raise AssertionError("each kind of engine answers by itself")

    def left(self, request_id: str, handle: Any) -> None:
        """A connection ended while one of its `requests` ran."""

    async def listen(self, socket_path: Path | None, tcp: tuple[str, int] | None) -> list[str]:
        """Open the sockets; returns their addresses. A unix socket is for its owner only (0600).

        Raises RequestError (bad_request) for an address that cannot be had.
        """
        try:
            return await self._open(socket_path, tcp)
        except OSError as error:
            where = " and ".join(str(address) for address in (socket_path, tcp) if address is not None)
            raise RequestError("bad_request", f"cannot listen on {where}: {error}; name another address") from error

    async def _open(self, socket_path: Path | None, tcp: tuple[str, int] | None) -> list[str]:
        addresses = []
        if socket_path is not None:
            clear_stale(socket_path)
            self._servers.append(await asyncio.start_unix_server(self._serve, path=str(socket_path)))
            os.chmod(socket_path, 0o600)
            self._socket = socket_path
            addresses.append(str(socket_path))
        if tcp is not None:
            server = await asyncio.start_server(self._serve, *tcp)
            self._servers.append(server)
            host, port = server.sockets[0].getsockname()[:2]
            addresses.append(f"{host}:{port}")
        return addresses

    async def close(self) -> None:
        """Stop listening, cut connections, remove the socket."""
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.abort()
        for server in self._servers:
            await server.wait_closed()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    # -- one connection -------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        self._connections.add(connection)
        pump = asyncio.create_task(connection.write_queued())
        calls: set[asyncio.Task[None]] = set()
        try:
            while True:
                message = await read_frame(reader)
                if len(calls) >= MAX_CALLS_PER_CONNECTION:
                    raise RequestError(
                        "bad_request",
                        f"more than {MAX_CALLS_PER_CONNECTION} calls are being prepared on this connection",
                    )
                task = asyncio.create_task(self._call(connection, message))
                calls.add(task)
                task.add_done_callback(calls.discard)
                await asyncio.sleep(0)  # reading what is there already lets nobody else run
        except RequestError as error:
            connection.push(error_frame(None, error))
            await asyncio.sleep(0)  # let the writer see it before the connection ends
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(connection)
            for task in calls:
                task.cancel()
            pump.cancel()
            for request_id, handle in list(connection.requests.items()):
                self.left(request_id, handle)
            connection.abort()

    async def _call(self, connection: Connection, message: Frame) -> None:
        call_id = message.get("id")
        try:
            await self.dispatch(connection, call_id, message)
        except EngineError as error:
            connection.push(error_frame(call_id, error))


def error_frame(call_id: Any, error: EngineError) -> Frame:
    code = error.code if isinstance(error, RequestError) else "engine_fault"
    frame = {"type": "error", "id": call_id, "code": code, "message": str(error)}
    if isinstance(error, ServerUnavailable):
        return {**frame, "code": "server_unavailable", "retry_after_s": error.retry_after_s}
    return frame


def clear_stale(path: Path) -> None:
    """Remove the socket that a killed engine left; refuse to take one that answers."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise RequestError("bad_request", f"{path} exists and is not a socket; name another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise RequestError("bad_request", f"another engine answers at {path}; stop it or name another path")
