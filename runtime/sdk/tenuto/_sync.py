"""The blocking client."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Self

import httpx

from tenuto import _wire
from tenuto._files import Files
from tenuto.models import Event, Question, Ran, Receipt, SessionInfo, Turn


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
        """Give the connections back. The sessions go on."""
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """The models that the server can run, with their cards."""
        data: list[dict[str, Any]] = self.get("/v1/models")["data"]
        return data

    def questions(self, session_id: str | None = None) -> list[Question]:
        """What sessions wait for: approvals, unknown outcomes, results of the caller's own tools, budgets."""
        params = {"limit": 1000, **({"session": session_id} if session_id else {})}
        return [Question.model_validate(row) for row in (self.get("/v1/approvals", params))["data"]]

    def answer(self, question_id: str, decision: str, **more: Any) -> Question:
        """Answer one: approve or decline (`reason`); ran (`output`), did_not_run; result (`output`, `is_error`); raise
        (`budget`), stop. The first answer holds; another one raises APIError (409)."""
        body = {"decision": decision, **more}
        return Question.model_validate(self.post(f"/v1/approvals/{question_id}", body))

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One GET of the API, retried while the server is away. Raises APIError, ConnectionFailed."""
        return self._send(self._http.build_request("GET", path, params=params))

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, key: str | None = None) -> dict[str, Any]:
        """One POST with an idempotency key, retried as GET is: it takes effect once."""
        return self._send(self._http.build_request("POST", path, json=body or {}, headers=_wire.post_headers(key)))

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One PATCH, retried as GET is."""
        return self._send(self._http.build_request("PATCH", path, json=body))

    def post_bytes(self, path: str, body: bytes, *, key: str | None = None) -> dict[str, Any]:
        """One POST of bytes, retried as `post` is."""
        headers = {**_wire.post_headers(key), **_wire.BYTES}
        return self._send(self._http.build_request("POST", path, content=body, headers=headers))

    def put(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        params: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> dict[str, Any]:
        """One PUT of a JSON object or of bytes, retried as `post` is."""
        headers = {**_wire.post_headers(key), **(_wire.BYTES if isinstance(body, bytes) else {})}
        content, json = (body, None) if isinstance(body, bytes) else (None, body)
        return self._send(
            self._http.build_request("PUT", path, params=params, content=content, json=json, headers=headers)
        )

    def delete(self, path: str, *, key: str | None = None) -> dict[str, Any]:
        """One DELETE, retried as `post` is."""
        return self._send(self._http.build_request("DELETE", path, headers=_wire.post_headers(key)))

    def read(self, path: str, params: Mapping[str, Any] | None = None) -> bytes:
        """The bytes of one GET, retried. Raises APIError, ConnectionFailed."""
        return self._answered(lambda: self._http.build_request("GET", path, params=params)).content

    def download(self, path: str, target: str | os.PathLike[str], params: Mapping[str, Any] | None = None) -> None:
        """One GET into a file, which is there once it is whole. Not retried once bytes have come."""
        try:
            with self._http.stream("GET", path, params=params, timeout=_wire.STREAM_TIMEOUT) as response:
                if not response.is_success:
                    response.read()
                _wire.checked(response)
                with _wire.whole_file(target) as file:
                    for chunk in response.iter_bytes():
                        file.write(chunk)
        except httpx.TransportError as error:
            raise self._server.away(error) from error

    def upload(self, path: str, source: str | os.PathLike[str], *, key: str | None = None) -> dict[str, Any]:
        """One POST of a file, read as it is sent; retried as `post` is."""
        headers = {**_wire.post_headers(key), **_wire.BYTES, "Content-Length": str(os.stat(source).st_size)}

        def request() -> httpx.Request:
            content = _wire.pieces_of(source)
            return self._http.build_request("POST", path, content=content, headers=headers, timeout=_wire.LONG_TIMEOUT)

        return _wire.read_answer(self._answered(request))

    def _send(self, request: httpx.Request) -> dict[str, Any]:
        return _wire.read_answer(self._answered(lambda: request))

    def _answered(self, request: Callable[[], httpx.Request]) -> httpx.Response:
        """Send, and again where the server was away: every request is safe to repeat. Raises APIError."""
        failure: Exception | None = None
        for attempt in range(_wire.ATTEMPTS):
            if attempt:
                time.sleep(_wire.pause_before(attempt - 1))
            try:
                response = self._http.send(request())
            except httpx.TransportError as error:
                failure = error
                continue
            if response.status_code not in _wire.RETRIED_STATUS or attempt == _wire.ATTEMPTS - 1:
                return _wire.checked(response)
        raise self._server.away(failure) from failure

    def stream(self, path: str, after: int) -> Generator[Event, None, None]:
        """Events after a position, each once and in order, across lost connections, until the session ends."""
        place = _wire.Resume(self._server, after)
        while not place.ended:
            failure: Exception | None = None
            try:
                headers = place.connect()
                with self._http.stream("GET", path, headers=headers, timeout=_wire.STREAM_TIMEOUT) as response:
                    if response.is_success:
                        for chunk in response.iter_bytes():
                            yield from place.feed(chunk)
                    else:
                        response.read()
                        failure = _wire.refusal(response)
                        if response.status_code not in _wire.RETRIED_STATUS:
                            raise failure
            except httpx.TransportError as error:
                failure = error
            if not place.ended:
                time.sleep(place.pause(failure))


class Sessions:
    """The sessions of a tenant: make, find and list them."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(
        self,
        *,
        model: str = "",
        system: str | None = None,
        tools: Sequence[str | Mapping[str, Any]] | None = None,
        files: Mapping[str, str] | None = None,
        limits: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        kv: Mapping[str, Any] | None = None,
        seed: int | None = None,
        approvals: Mapping[str, Any] | None = None,
        budget: Mapping[str, Any] | None = None,
        on_busy: str | None = None,
        context_policy: str | None = None,
        egress: Sequence[str] = (),
        image: str | None = None,
        agent: str | None = None,
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Session:
        """Create a session.

        `tools`: names of built-in ones, or tools of your own; `files`: its first workspace; `approvals`: tools whose
        calls wait for a person; `budget`: what it may use in all; `on_busy`: what a message does that comes while it
        works; `context_policy`: what gives way in a full context; `egress`: hosts that its sandbox may reach;
        `image`: what its sandbox is made of; `agent`: a name, or `name@3`, which says whatever is not said here.
        """
        more: dict[str, Any] = {
            "approvals": approvals,
            "budget": budget,
            "on_busy": on_busy,
            "context_policy": context_policy,
            "image": image,
            "agent": agent,
            "metadata": metadata,
        }
        more["egress"] = list(egress) or None
        body = _wire.session_body(model, system, tools, files, limits, sampling, kv, seed, **more)
        return Session(self._client, self._client.post("/v1/sessions", body, key=idempotency_key)["id"])

    def get(self, session_id: str) -> Session:
        """The session of this id. Raises APIError (404) where there is none."""
        self._client.get(f"/v1/sessions/{session_id}")
        return Session(self._client, session_id)

    def import_(self, path: str | os.PathLike[str], *, idempotency_key: str | None = None) -> Session:
        """A new session from a file that `export` wrote: it goes on where that one stood. `missing_secrets` of it names
        the values that the file does not have."""
        made = self._client.upload("/v1/sessions/import", path, key=idempotency_key)
        return Session(self._client, made["id"], missing_secrets=made["secrets"])

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

    def __init__(self, client: Client, session_id: str, *, missing_secrets: Sequence[str] = ()) -> None:
        self._client = client
        self.id = session_id
        self.missing_secrets = tuple(missing_secrets)  # of one that was imported
        self._path = f"/v1/sessions/{session_id}"

    def info(self) -> SessionInfo:
        """How the session stands now."""
        return SessionInfo.model_validate(self._client.get(self._path))

    def send(
        self,
        content: str,
        *,
        tool_choice: str = "auto",
        max_tool_rounds: int = 8,
        on_busy: str | None = None,
        idempotency_key: str | None = None,
    ) -> str:
        """Give the session a message and return its id. Once this returns, the message is never lost.

        `on_busy`: enqueue, reject (APIError 409) or interrupt; by default as the session says.
        """
        body = _wire.message_body(content, tool_choice, max_tool_rounds, on_busy)
        message_id: str = self._client.post(f"{self._path}/events", body, key=idempotency_key)["id"]
        return message_id

    def stream(self, after: int = 0) -> Generator[Event, None, None]:
        """Follow the session's events from a position on until it ends. Reconnects by itself and misses nothing."""
        return self._client.stream(f"{self._path}/events/stream", after)

    def run(
        self,
        content: str,
        *,
        tool_choice: str = "auto",
        max_tool_rounds: int = 8,
        on_busy: str | None = None,
    ) -> Turn:
        """Send a message and wait until the session rests again. Raises SessionFailed."""
        after = self.position()
        sent = self.send(content, tool_choice=tool_choice, max_tool_rounds=max_tool_rounds, on_busy=on_busy)
        turn = _wire.TurnReader(sent)
        with contextlib.closing(self.stream(after)) as events:
            for event in events:
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
        return self.info().last_event

    def steps(self) -> list[dict[str, Any]]:
        """Every step: its kind, state, attempts and tokens."""
        return self._list("steps")

    def attempts(self) -> list[dict[str, Any]]:
        """Every attempt at a step: on which node, from where it resumed, how it ended."""
        return self._list("attempts")

    def checkpoints(self) -> list[dict[str, Any]]:
        """Every checkpoint: what a session that is resumed starts from."""
        return self._list("checkpoints")

    def token_ids(self) -> list[int]:
        """The transcript's token ids."""
        return [token for segment in self._list("transcript") for token in segment["token_ids"]]

    def kv(self) -> dict[str, Any]:
        """Where the session's KV was last seen."""
        return self._client.get(f"{self._path}/kv")

    @property
    def files(self) -> Files:
        """The session's workspace."""
        return Files(self._client, self._path)

    def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        stdin: str = "",
        idempotency_key: str | None = None,
    ) -> Ran:
        """Run a command in the session's sandbox: an argument list, or a text for bash. Raises APIError (409) while the
        session works.

        `reason` is `outcome_unknown` where the sandbox was lost while it ran: it is not run again by itself.
        """
        body = _wire.exec_body(command, timeout_s, stdin)
        made = self._client.post(f"{self._path}/sandbox/exec?wait_s=20", body, key=idempotency_key)
        while made["state"] == "accepted":
            time.sleep(_wire.LOOK_EVERY_S)
            made = self._client.get(f"{self._path}/sandbox/exec/{made['id']}")
        return Ran.model_validate(made)

    def pin(self, *, ttl_s: float | None = None) -> Receipt:
        """Keep the session's pages on the device, for so many seconds if given."""
        return self._intent("pin", ttl_s=ttl_s)

    def offload(self, tier: str = "auto", *, wait: bool = False) -> Receipt:
        """Copy the session's pages to a tier (host, nvme, shared, or where the policy says); with `wait`, return once
        they are there."""
        return self._intent("offload", tier=tier, wait=wait)

    def prefetch(self, *, wait: bool = False) -> Receipt:
        """Bring the session's pages back to the device."""
        return self._intent("prefetch", wait=wait)

    def release_kv(self) -> Receipt:
        """Stop keeping the session's pages on the device."""
        return self._intent("release")

    def _intent(self, intent: str, **given: Any) -> Receipt:
        body = {name: value for name, value in given.items() if value is not None}
        return Receipt.model_validate(self._client.post(f"{self._path}/kv/{intent}", body))

    def export(self, path: str | os.PathLike[str], *, snapshots: str = "last") -> None:
        """Write the session to a file: its record and its workspace (`snapshots="all"`: every checkpoint's), without
        secrets and without KV."""
        self._client.download(f"{self._path}/export", path, {"snapshots": snapshots})

    def pause(self, *, wait: bool = True) -> SessionInfo:
        """Stop spending: a think stops at its last durable token, a tool runs to its end.

        As with all that is asked of a session: with `wait`, return once it is done.
        """
        return self._command("pause", None, wait)

    def resume(self, *, wait: bool = True) -> SessionInfo:
        """Go on where the session was paused."""
        return self._command("resume", None, wait)

    def retry(self, *, wait: bool = True) -> SessionInfo:
        """Go on at the step that failed."""
        return self._command("retry", None, wait)

    def interrupt(self, *, wait: bool = True) -> SessionInfo:
        """End the turn: what was sampled stays, calls that run are stopped, and the session rests."""
        return self._command("interrupt", None, wait)

    def rewind(self, step: int, *, seed: int | None = None, resume: bool = False, wait: bool = True) -> SessionInfo:
        """Go back to the checkpoint of a step. With a `seed`, what is sampled from there on differs."""
        return self._command("rewind", _wire.branch_body(step, seed, resume), wait)

    def fork(
        self,
        step: int | None = None,
        *,
        seed: int | None = None,
        resume: bool = False,
        idempotency_key: str | None = None,
    ) -> Session:
        """A new session that begins as this one was at a checkpoint (the last by default); nothing is copied."""
        body = _wire.branch_body(step, seed, resume)
        made = self._client.post(f"{self._path}/fork", body, key=idempotency_key)
        return Session(self._client, made["id"])

    def complete(self, *, wait: bool = True) -> SessionInfo:
        """End a session that rests and free what it holds; with `wait`, return once that is true."""
        return self._ended(self._ask("complete"), wait)

    def questions(self) -> list[Question]:
        """What the session waits for now."""
        return self._client.questions(self.id)

    def until(self, *states: str) -> SessionInfo:
        """Wait until the session is in one of these states, or has ended."""
        info = self.info()
        wanted = {*states, "cancelled", "completed"}
        while info.state not in wanted:
            with contextlib.closing(self.stream(info.last_event)) as events:
                for event in events:
                    if event.type.startswith("session."):
                        break
            info = self.info()
        return info

    def cancel(self, *, wait: bool = True) -> SessionInfo:
        """Stop the session and free what it holds; with `wait`, return once that is true."""
        return self._ended(self._ask("cancel"), wait)

    def _command(self, verb: str, body: Mapping[str, Any] | None, wait: bool) -> SessionInfo:
        before = self.position()
        made = self._client.post(f"{self._path}/{verb}", body)
        if not wait:
            return SessionInfo.model_validate(made)
        with contextlib.closing(self.stream(before)) as events:
            for event in events:
                if event.data.get("command_id") == made["command"]:
                    _wire.ensure_applied(event)
                    break
        return self.info()

    def _ask(self, verb: str, body: Mapping[str, Any] | None = None) -> SessionInfo:
        return SessionInfo.model_validate(self._client.post(f"{self._path}/{verb}", body))

    def _ended(self, info: SessionInfo, wait: bool) -> SessionInfo:
        """The session once nothing of it is left, if that is to be waited for."""
        ends = info.ending is not None or info.state == "cancelling"
        if wait and ends and info.state not in ("cancelled", "completed"):
            for _ in self.stream(info.last_event):
                pass
            info = self.info()
        return info

    def _list(self, what: str) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = self._client.get(f"{self._path}/{what}")["data"]
        return data
