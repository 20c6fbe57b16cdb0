"""A small real HTTP server that answers as it is told, and both clients behind one blocking face."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import tenuto


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def after(self) -> int:
        return int(self.headers["last-event-id"])

    @property
    def key(self) -> str | None:
        return self.headers.get("idempotency-key")


@dataclass(frozen=True)
class Answer:
    """`cut`: how the connection ends after the body. None: as promised; "close": in the middle of a chunked body.
    `then`: what follows the body, as it comes."""

    status: int = 200
    body: bytes = b"{}"
    kind: str = "application/json"
    cut: str | None = None
    then: Callable[[], Iterator[bytes]] = lambda: iter(())
    headers: Mapping[str, str] = field(default_factory=dict)


DROP = Answer(cut="drop")  # hangs up without a word

Reply = Answer | Callable[[Seen], Answer]


def as_json(body: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(body).encode())


def problem(status: int, code: str = "conflict", message: str = "No.", param: str | None = None) -> Answer:
    return as_json({"error": {"code": code, "message": message, "param": param}}, status)


def frame(id: int, type: str = "step.started", step: int | None = None, **data: Any) -> bytes:
    event = {"id": id, "type": type, "created_at": "2026-01-01T00:00:00+00:00", "data": data}
    if step is not None:
        event["step"] = step
    return f"id: {id}\nevent: {type}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def events(body: bytes, cut: str | None = None) -> Answer:
    return Answer(200, body, "text/event-stream", cut)


class StubServer:
    """Answers requests with `replies`, in order; the last one is repeated."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.seen: list[Seen] = []
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one write per answer, or each would wait for an acknowledgement

            def do_GET(self) -> None:
                stub._answer(self)

            do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> StubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        seen = Seen(handler.command, handler.path, headers, body)
        with self._lock:
            self.seen.append(seen)
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        answer = reply if isinstance(reply, Answer) else reply(seen)
        if answer.cut != "drop":
            self._write(handler, answer)
        if answer.cut is not None:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)

    def _write(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        handler.send_response(answer.status)
        handler.send_header("Content-Type", answer.kind)
        handler.send_header("Transfer-Encoding", "chunked")
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        with contextlib.suppress(OSError):  # who asked may be gone
            self._piece(handler, answer.body)
            for piece in answer.then():
                handler.wfile.flush()  # what came before it, which else is one write with the rest
                self._piece(handler, piece)
            self._end(handler, answer)

    def _piece(self, handler: BaseHTTPRequestHandler, piece: bytes) -> None:
        if piece:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def _end(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        if answer.cut is None:
            handler.wfile.write(b"0\r\n\r\n")
        handler.wfile.flush()


class Blocking:
    """The asyncio client with the blocking one's face, so that one test asks both."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target, self._runner = target, runner

    def __getattr__(self, name: str) -> Any:
        return self._shown(getattr(self._target, name))

    def _shown(self, value: Any) -> Any:
        if inspect.ismethod(value):
            return lambda *args, **how: self._shown(value(*args, **how))
        if inspect.iscoroutine(value):
            return self._shown(self._runner.run(value))
        if isinstance(value, AsyncIterator):
            return self._each(value)
        is_ours = type(value).__module__.startswith("tenuto._async")
        return Blocking(value, self._runner) if is_ours else value

    def _each(self, values: AsyncIterator[Any]) -> Iterator[Any]:
        async def step() -> Any:
            return await anext(values)

        try:
            while True:
                try:
                    yield self._runner.run(step())
                except StopAsyncIteration:
                    return
        finally:
            self._runner.run(values.aclose())  # type: ignore[attr-defined]


def open_client(kind: str, url: str, key: str) -> Iterator[Any]:
    """A blocking client, or an asyncio one behind a blocking face."""
    if kind == "blocking":
        with tenuto.Client(url, key) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        client = tenuto.AsyncClient(url, key)
        try:
            yield Blocking(client, runner)
        finally:
            runner.run(client.close())
