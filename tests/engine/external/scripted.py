"""A model server that says what a test writes down, byte by byte, over a raw socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import EngineClient
from engine.external.__main__ import card_of
from engine.external.look import look
from engine.external.remote import Place, Remote, Timeouts
from engine.external.server import ExternalServer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 4096}]}


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def says(text: str | None = None, finish: str | None = None, **delta: Any) -> bytes:
    said = {**delta, **({"content": text} if text is not None else {})}
    return event(choices=[{"index": 0, "delta": said, "finish_reason": finish}])


def used(prompt: int = 10, cached: int = 4, completion: int = 3) -> bytes:
    details = {"cached_tokens": cached}
    return event(
        choices=[],
        usage={"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details},
    )


PATIENT = Timeouts(2.0, 5.0, 5.0)
DONE = b"data: [DONE]\n\n"
HELLO = HEAD + says("hel") + says("lo", "stop") + used() + DONE


def refusal(status: int, message: str, headers: str = "", **more: Any) -> bytes:
    body = json.dumps({"error": {"message": message, **more}}).encode()
    head = f"HTTP/1.1 {status} No\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


@dataclass
class Scripted:
    """`answers`: to one completion after the other, each in pieces; the last one to all that follow. A piece of None
    holds the connection until the client leaves."""

    answers: list[Sequence[bytes | None]] = field(default_factory=lambda: [[HELLO]])
    models: Any = field(default_factory=lambda: MODELS)
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    serving: set[Any] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.headers.append(head)
                if head.startswith("GET"):
                    is_list = head.split()[1] == "/v1/models"
                    body = json.dumps(self.models if is_list else {}).encode()
                    status = "200 OK" if is_list else "404 Not Found"
                    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                    continue
                size = next(int(line.split(":")[1]) for line in head.split("\r\n") if "content-length" in line.lower())
                self.asked.append(json.loads(await reader.readexactly(size)))
                await self._answer(reader, writer)
                break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pieces = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        for piece in pieces:
            if piece is None:
                await reader.read()
                self.left.set()
                return
            writer.write(piece)
            await writer.drain()


@contextlib.asynccontextmanager
async def scripted(*answers: Sequence[bytes | None], **about: Any) -> AsyncIterator[Scripted]:
    script = Scripted([*answers] or [[HELLO]], **about)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield script
    finally:
        server.close()
        for task in script.serving:
            task.cancel()
        await asyncio.gather(*script.serving, return_exceptions=True)


@contextlib.asynccontextmanager
async def engine_for(
    url: str, *, key: str | None = None, timeouts: Timeouts = PATIENT, **how: Any
) -> AsyncIterator[EngineClient]:
    """The engine in front of a server, in this process, and a client of it."""
    async with Remote(Place(url, key, timeouts)) as remote:
        served = await look(remote, **how)
        server = ExternalServer(card_of(served), remote, served)
        (address,) = await server.listen(None, ("127.0.0.1", 0))
        try:
            async with await EngineClient.connect(address) as client:
                yield client
        finally:
            await server.close()
