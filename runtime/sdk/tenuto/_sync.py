"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import httpx

from tenuto import _wire
from tenuto.errors import ConnectionFailed
from tenuto.models import Event, SessionInfo, Turn


class Client:
    """A connection to a Tenuto server. Use it as a context manager, or call `close()`."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, *, timeout_s: float = 30.0) -> None:
        self._server = _wire.Server.find(base_url, api_key)
        self._http = httpx.Client(
            base_url=self._server.url, headers=self._server.headers, timeout=timeout_s, trust_env=False
        )
        self.sessions = Sessions(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """The models that the server can run, with their cards."""
        data: list[dict[str, Any]] = self.get("/v1/models")["data"]
        return data

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._send(self._http.build_request("GET", path, params=params))

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, key: str | None = None) -> dict[str, Any]:
        return self._send(self._http.build_request("POST", path, json=body or {}, headers=_wire.post_headers(key)))

    def _send(self, request: httpx.Request) -> dict[str, Any]:
        """Send, and again where the server was away: every request is safe to repeat."""
        for attempt in range(_wire.ATTEMPTS):
            last = attempt == _wire.ATTEMPTS - 1
            try:
                response = self._http.send(request)
                if response.status_code not in _wire.RETRIED_STATUS or last:
                    _wire.raise_for(response)
                    body: dict[str, Any] = response.json()
                    return body
            except httpx.TransportError as error:
                if last:
                    raise ConnectionFailed(f"{self._server.url} does not answer: {error}") from error
            time.sleep(_wire.pause_before(attempt))
        raise AssertionError("unreachable")

    def stream(self, path: str, after: int) -> Iterator[Event]:
        """Events after a position, each once and in order, across lost connections, until the session ends."""
        failures = 0
        while True:
            reader = _wire.FrameReader()
            try:
                headers = {"Last-Event-ID": str(after)}
                with self._http.stream("GET", path, headers=headers, timeout=_wire.STREAM_TIMEOUT) as response:
                    if not response.is_success:
                        response.read()
                        if response.status_code not in _wire.RETRIED_STATUS:
                            _wire.raise_for(response)
                    for line in response.iter_lines() if response.is_success else ():
                        event = reader.feed(line)
                        if event is not None and event.id > after:
                            after, failures = event.id, 0
                            yield event
                            if event.type in ("session.cancelled", "session.completed"):
                                return
            except httpx.TransportError as error:
                if failures >= 60:
                    raise ConnectionFailed(f"{self._server.url} does not answer: {error}") from error
            failures += 1
            time.sleep(min(_wire.pause_before(failures), 1.0))


class Sessions:
    def __init__(self, client: Client) -> None:
        self._client = client

    def create(
        self,
        *,
        model: str = "",
        system: str | None = None,
        tools: Sequence[str | Mapping[str, Any]] = (),
        files: Mapping[str, str] | None = None,
        limits: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        kv: Mapping[str, Any] | None = None,
        seed: int | None = None,
        idempotency_key: str | None = None,
    ) -> Session:
        """Create a session. `tools`: names of built-in ones, or commands of your own; `files`: its first workspace."""
        body = _body(model, system, tools, files, limits, sampling, kv, seed)
        return Session(self._client, self._client.post("/v1/sessions", body, key=idempotency_key)["id"])

    def get(self, session_id: str) -> Session:
        self._client.get(f"/v1/sessions/{session_id}")
        return Session(self._client, session_id)

    def list(self, *, limit: int = 50) -> Iterator[SessionInfo]:
        """Every session of the tenant, newest first."""
        after: str | None = None
        while True:
            page = self._client.get("/v1/sessions", {"limit": limit, **({"after": after} if after else {})})
            yield from (SessionInfo.model_validate(row) for row in page["data"])
            if not page["has_more"]:
                return
            after = page["last_id"]


class Session:
    """One durable session. Its state lives on the server; this is a handle to it."""

    def __init__(self, client: Client, session_id: str) -> None:
        self._client = client
        self.id = session_id
        self._path = f"/v1/sessions/{session_id}"

    def info(self) -> SessionInfo:
        return SessionInfo.model_validate(self._client.get(self._path))

    def send(
        self,
        content: str,
        *,
        tool_choice: str = "auto",
        max_tool_rounds: int = 8,
        idempotency_key: str | None = None,
    ) -> str:
        """Give the session a message and return its id. Once this returns, the message is never lost."""
        body = {"content": content, "tool_choice": tool_choice, "max_tool_rounds": max_tool_rounds}
        message_id: str = self._client.post(f"{self._path}/events", body, key=idempotency_key)["id"]
        return message_id

    def stream(self, after: int = 0) -> Iterator[Event]:
        """Follow the session's events from a position on. Reconnects by itself and misses nothing."""
        return self._client.stream(f"{self._path}/events/stream", after)

    def run(self, content: str, *, tool_choice: str = "auto", max_tool_rounds: int = 8) -> Turn:
        """Send a message and wait until the session rests again. Raises SessionFailed."""
        after = self.position()
        turn = _wire.TurnReader(self.send(content, tool_choice=tool_choice, max_tool_rounds=max_tool_rounds))
        for event in self.stream(after):
            turn.feed(event)
            if turn.done:
                break
        return turn.result()

    def events(self, after: int = 0) -> list[Event]:
        """Every event after a position, up to now."""
        found: list[Event] = []
        while True:
            page = self._client.get(f"{self._path}/events", {"after": after, "limit": 1000})
            found.extend(Event.model_validate(row) for row in page["data"])
            if not page["has_more"]:
                return found
            after = page["last_id"]

    def position(self) -> int:
        """The position of the last event."""
        events = self.events()
        return events[-1].id if events else 0

    def steps(self) -> list[dict[str, Any]]:
        return self._list("steps")

    def attempts(self) -> list[dict[str, Any]]:
        return self._list("attempts")

    def checkpoints(self) -> list[dict[str, Any]]:
        return self._list("checkpoints")

    def token_ids(self) -> list[int]:
        """The transcript's token ids."""
        return [token for segment in self._list("transcript") for token in segment["token_ids"]]

    def kv(self) -> dict[str, Any]:
        """Where the session's KV was last seen."""
        return self._client.get(f"{self._path}/kv")

    def cancel(self, *, wait: bool = True) -> SessionInfo:
        """Stop the session and free what it holds; with `wait`, return once that is true."""
        info = SessionInfo.model_validate(self._client.post(f"{self._path}/cancel"))
        if wait and info.state == "cancelling":
            for _ in self.stream():
                pass
            info = self.info()
        return info

    def _list(self, what: str) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = self._client.get(f"{self._path}/{what}")["data"]
        return data


def _body(
    model: str,
    system: str | None,
    tools: Sequence[str | Mapping[str, Any]],
    files: Mapping[str, str] | None,
    limits: Mapping[str, Any] | None,
    sampling: Mapping[str, Any] | None,
    kv: Mapping[str, Any] | None,
    seed: int | None,
) -> dict[str, Any]:
    given = {"system": system, "files": files, "limits": limits, "sampling": sampling, "kv": kv, "seed": seed}
    return {
        "model": model,
        "tools": list(tools),
        **{name: value for name, value in given.items() if value is not None},
    }
