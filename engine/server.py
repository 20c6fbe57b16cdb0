"""Sockets in front of the compute thread. A slow or vanished reader costs the engine nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine.constraint import Constraints
from engine.core import EngineCore
from engine.errors import EngineError, RequestError
from engine.fields import Fields
from engine.hinted import Hinted
from engine.hints import parse_envelope
from engine.intents import Intents
from engine.kvcall import parse_kv
from engine.live import Frame, Guides, Sink
from engine.memory_use import MemoryUse
from engine.reports import Reports, parse_audit
from engine.request import GenerateSpec, parse_generate
from engine.wire import ModelCard, encode_frame, read_frame

MAX_QUEUED_FRAMES = 4096
MAX_CALLS_PER_CONNECTION = 256


class Connection:
    """One client. Frames out are queued; token frames of one generation merge while they wait."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.requests: dict[str, Sink] = {}  # by request_id
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


class EngineServer:
    """Speaks the token-level protocol for one engine core."""

    def __init__(
        self,
        core: EngineCore,
        intents: Intents,
        constraints: Constraints,
        card: ModelCard,
        memory: MemoryUse | None = None,
    ) -> None:
        self._core = core
        self._intents = intents
        self._hinted = Hinted(intents)
        self._reports = Reports(core, intents.keeper, memory)
        self._constraints = constraints
        self._card = card
        self._servers: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
        self._socket: Path | None = None

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
            _clear_stale(socket_path)
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
            connection.push(_error(None, error))
            await asyncio.sleep(0)  # let the writer see it before the connection ends
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(connection)
            for task in calls:
                task.cancel()
            pump.cancel()
            for request_id, sink in connection.requests.items():
                self._core.post(partial(self._core.cancel, request_id, sink))
            connection.abort()

    async def _call(self, connection: Connection, message: Frame) -> None:
        call_id = message.get("id")
        try:
            await self._dispatch(connection, call_id, message)
        except RequestError as error:
            connection.push(_error(call_id, error))

    async def _dispatch(self, connection: Connection, call_id: Any, message: Frame) -> None:
        kind = message.get("type")
        reply = self._replier(connection, call_id)
        if kind == "hello":
            connection.push({"type": "hello", "id": call_id, **self._card.as_message()})
        elif kind == "generate":
            await self._generate(connection, call_id, message)
        elif kind == "cancel":
            request_id = Fields(message).text("request_id")
            if request_id in connection.preparing:
                await connection.preparing[request_id].wait()
            self._post(reply, lambda: reply({"cancelled": self._core.cancel(request_id)}))
        elif kind == "kv":
            call = parse_kv(message)
            self._post(reply, lambda: self._intents.handle(call, reply))
        elif kind == "kv_state":
            session = Fields(message).text("session")
            self._post(reply, lambda: self._reports.state(session, reply))
        elif kind == "stats":
            self._post(reply, lambda: self._reports.stats(reply))
        elif kind == "spans":
            self._post(reply, lambda: self._reports.spans(reply))
        elif kind == "decisions":
            fields = Fields(message)
            after, limit = fields.integer("after", 0, 0, 1 << 62), fields.integer("limit", 1000, 1, 10_000)
            self._post(reply, lambda: self._reports.decisions(after, limit, reply))
        elif kind == "learn":
            salts = Fields(message).salts("salts")
            self._post(reply, lambda: self._reports.learn(salts, reply))
        elif kind == "audit":
            ask = parse_audit(message)
            self._post(reply, lambda: self._reports.audit(ask, reply))
        elif kind == "kv_hints":
            hints = parse_envelope(message)
            self._post(reply, lambda: self._hinted.act(hints, reply))
        elif kind == "delete_keys":
            keys, unheld = Fields(message).keys("keys"), Fields(message).flag("unheld", False)
            self._post(reply, lambda: self._reports.delete_keys(keys, reply, unheld=unheld))
        else:
            raise RequestError(
                "bad_request",
                f"type is {kind!r}; hello, generate, cancel, kv, kv_hints, kv_state, stats, spans, decisions, audit,"
                " learn and delete_keys are possible",
            )

    async def _generate(self, connection: Connection, call_id: Any, message: Frame) -> None:
        spec = parse_generate(message)
        if spec.request_id in connection.requests or spec.request_id in connection.preparing:
            raise RequestError("duplicate_request", f"request {spec.request_id!r} is already running")
        guides = await self._guides(connection, spec)
        loop = asyncio.get_running_loop()

        def deliver(frame: Frame) -> None:
            if frame["type"] in ("done", "error"):
                connection.requests.pop(spec.request_id, None)
            connection.push(frame)

        def sink(frame: Frame) -> None:
            _from_thread(loop, lambda: deliver({**frame, "id": call_id}))

        connection.requests[spec.request_id] = sink

        def submit() -> None:
            try:
                self._core.submit(spec, guides, sink)
            except RequestError as error:
                sink(_error(call_id, error))

        self._core.post(submit)

    async def _guides(self, connection: Connection, spec: GenerateSpec) -> Guides:
        """A cancel that comes meanwhile waits, and finds the request in the core's inbox before it."""
        if spec.grammar is None and not spec.stop:
            return Guides()
        if not spec.replay and not spec.stop and spec.grammar and self._constraints.knows(spec.grammar):
            return Guides(self._constraints.build(spec.grammar))
        handed_over = connection.preparing[spec.request_id] = asyncio.Event()
        try:
            return await asyncio.to_thread(self._built, spec)
        finally:
            del connection.preparing[spec.request_id]
            handed_over.set()  # who waits runs after this task has posted the request

    def _built(self, spec: GenerateSpec) -> Guides:
        before, make = spec.generated_before, self._constraints
        constraint = None if spec.grammar is None else make.build(spec.grammar, before)
        return Guides(constraint, make.stop_text(spec.stop, before) if spec.stop else None)

    def _replier(self, connection: Connection, call_id: Any) -> Callable[[dict[str, Any]], None]:
        loop = asyncio.get_running_loop()
        return lambda result: _from_thread(loop, lambda: connection.push({"type": "result", **result, "id": call_id}))

    def _post(self, reply: Callable[[dict[str, Any]], None], command: Callable[[], None]) -> None:
        def run() -> None:
            try:
                command()
            except EngineError as error:
                reply(_error(None, error))

        self._core.post(run)


def _error(call_id: Any, error: EngineError) -> Frame:
    code = error.code if isinstance(error, RequestError) else "engine_fault"
    return {"type": "error", "id": call_id, "code": code, "message": str(error)}


def _from_thread(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
        loop.call_soon_threadsafe(call)


def _clear_stale(path: Path) -> None:
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
