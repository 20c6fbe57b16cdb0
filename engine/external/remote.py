"""HTTP to a model server: one request, one answer. Nothing is tried again here: Temporal does that, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from engine.errors import RequestError, ServerUnavailable
from engine.external.events import EventData
from engine.external.refusals import of_status

_MAX_BODY = 4 * 1024 * 1024
_END = "[DONE]"


@dataclass(frozen=True)
class Timeouts:
    """Seconds: to connect, from the request to the first event, and between two of them."""

    connect_s: float = 10.0
    first_s: float = 300.0
    between_s: float = 60.0


@dataclass(frozen=True)
class Place:
    """`url` ends before /chat/completions. `key` is sent as a bearer token, and shown nowhere."""

    url: str
    key: str | None = field(default=None, repr=False)
    timeouts: Timeouts = Timeouts()

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")


class Remote:
    """Raises RequestError for what the server refuses, ServerUnavailable for what passes."""

    def __init__(self, place: Place) -> None:
        self.place = place
        headers = {"Authorization": f"Bearer {place.key}"} if place.key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        timeout = httpx.Timeout(None, connect=place.timeouts.connect_s)
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def get(self, url: str) -> Any:
        """The JSON that is there."""
        with self._told(url):
            async with asyncio.timeout(self.place.timeouts.connect_s), self._client.stream("GET", url) as answer:
                body = await _body(answer)
        if answer.status_code != 200:
            raise self._discreet(of_status(answer.status_code, body, answer.headers.get("retry-after")))
        return body

    async def chunks(self, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """What a chat completion streams, until it says that it is done, or ends."""
        url, timeouts = f"{self.place.url}/chat/completions", self.place.timeouts
        sent = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        with self._told(url):
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(timeouts.first_s):
                    request = self._client.stream("POST", url, content=sent, headers=headers)
                    answer = await stack.enter_async_context(request)
                    if answer.status_code != 200:
                        retry_after = answer.headers.get("retry-after")
                        raise self._discreet(of_status(answer.status_code, await _body(answer), retry_after))
                    _ensure_stream(answer)
                events = _data(answer, timeouts.first_s, timeouts.between_s)
                async with contextlib.aclosing(events):
                    async for data in events:
                        if data.strip() == _END:
                            return
                        yield _chunk(data)

    @contextlib.contextmanager
    def _told(self, url: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise ServerUnavailable(f"{url} said nothing for too long") from error
        except httpx.InvalidURL as error:
            raise RequestError("server_refused", f"{url} is no address: {error}") from error
        except httpx.HTTPError as error:
            raise ServerUnavailable(f"{url}: {_words(error)}") from error

    def _discreet(self, error: Exception) -> Exception:
        """A server may say the key again that it does not take."""
        key = self.place.key
        if key:
            error.args = tuple(str(arg).replace(key, "[key]") for arg in error.args)
            if isinstance(error, RequestError):
                error.message = error.message.replace(key, "[key]")
        return error


async def _data(answer: httpx.Response, first_s: float, between_s: float) -> AsyncGenerator[str, None]:
    events, pieces, patience_s = EventData(), answer.aiter_bytes(), first_s
    while True:
        async with asyncio.timeout(patience_s):
            piece = await anext(pieces, None)
        for data in events.push(piece) if piece is not None else events.finish():
            patience_s = between_s
            yield data
        if piece is None:
            return


def _chunk(data: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        shown = data if len(data) <= 80 else data[:77] + "..."
        raise RequestError("bad_answer", f"the server sent an event that is no JSON: {shown!r}") from error


def _ensure_stream(answer: httpx.Response) -> None:
    kind = answer.headers.get("content-type", "").partition(";")[0].strip()
    if kind in ("application/json", "text/html"):
        raise RequestError("bad_answer", f"the server sent {kind} where a stream of events was asked for")


async def _body(answer: httpx.Response) -> Any:
    data = b""
    async for piece in answer.aiter_bytes():
        data += piece
        if len(data) > _MAX_BODY:
            raise RequestError("bad_answer", f"the server sent more than {_MAX_BODY} bytes where a word was enough")
    text = data.decode("utf-8", errors="replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _words(error: Exception) -> str:
    return str(error).replace("\0", " ") or type(error).__name__
