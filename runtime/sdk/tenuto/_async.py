"""The asyncio client: the same calls as the blocking one, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

import httpx

from tenuto import _wire
from tenuto._files import AsyncFiles
from tenuto.models import Event, Question, Ran, Receipt, SessionInfo, Turn


class AsyncClient:
    """A connection to a Tenuto server. Use it as an async context manager, or await `close()`."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, *, timeout_s: float = 30.0) -> None:
        self._server = _wire.Server.find(base_url, api_key)
        self._http = httpx.AsyncClient(
            base_url=self._server.url, headers=self._server.headers, timeout=timeout_s, trust_env=False
        )
        self.sessions = AsyncSessions(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connections back. The sessions go on."""
        await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """The models that the server can run, with their cards."""
        data: list[dict[str, Any]] = (await self.get("/v1/models"))["data"]
        return data

    async def questions(self, session_id: str | None = None) -> list[Question]:
        """What sessions wait for: approvals, unknown outcomes, results of the caller's own tools, budgets."""
        params = {"limit": 1000, **({"session": session_id} if session_id else {})}
        return [Question.model_validate(row) for row in (await self.get("/v1/approvals", params))["data"]]

    async def answer(self, question_id: str, decision: str, **more: Any) -> Question:
        """Answer one: approve or decline (`reason`); ran (`output`), did_not_run; result (`output`, `is_error`); raise
        (`budget`), stop. The first answer holds; another one raises APIError (409)."""
        body = {"decision": decision, **more}
        return Question.model_validate(await self.post(f"/v1/approvals/{question_id}", body))

    async def get(self, path: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One GET of the API, retried while the server is away. Raises APIError, ConnectionFailed."""
        return await self._send(self._http.build_request("GET", path, params=params))

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, key: str | None = None) -> dict[str, Any]:
        """One POST with an idempotency key, retried as GET is: it takes effect once."""
        return await self._send(
            self._http.build_request("POST", path, json=body or {}, headers=_wire.post_headers(key))
        )

    async def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One PATCH, retried as GET is."""
        return await self._send(self._http.build_request("PATCH", path, json=body))

    async def post_bytes(self, path: str, body: bytes, *, key: str | None = None) -> dict[str, Any]:
        """One POST of bytes, retried as `post` is."""
        headers = {**_wire.post_headers(key), **_wire.BYTES}
        return await self._send(self._http.build_request("POST", path, content=body, headers=headers))

    async def put(
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
        return await self._send(
            self._http.build_request("PUT", path, params=params, content=content, json=json, headers=headers)
        )

    async def delete(self, path: str, *, key: str | None = None) -> dict[str, Any]:
        """One DELETE, retried as `post` is."""
        return await self._send(self._http.build_request("DELETE", path, headers=_wire.post_headers(key)))

    async def read(self, path: str, params: Mapping[str, Any] | None = None) -> bytes:
        """The bytes of one GET, retried. Raises APIError, ConnectionFailed."""
        return (await self._answered(lambda: self._http.build_request("GET", path, params=params))).content

    async def download(
        self, path: str, target: str | os.PathLike[str], params: Mapping[str, Any] | None = None
    ) -> None:
        """One GET into a file, which is there once it is whole. Not retried once bytes have come."""
        try:
            async with self._http.stream("GET", path, params=params, timeout=_wire.STREAM_TIMEOUT) as response:
                if not response.is_success:
                    await response.aread()
                _wire.checked(response)
                with _wire.whole_file(target) as file:
                    async for chunk in response.aiter_bytes():
                        file.write(chunk)
        except httpx.TransportError as error:
            raise self._server.away(error) from error

    async def upload(self, path: str, source: str | os.PathLike[str], *, key: str | None = None) -> dict[str, Any]:
        """One POST of a file, read as it is sent; retried as `post` is."""
        headers = {**_wire.post_headers(key), **_wire.BYTES, "Content-Length": str(os.stat(source).st_size)}

        def request() -> httpx.Request:
            content = _wire.apieces_of(source)
            return self._http.build_request("POST", path, content=content, headers=headers, timeout=_wire.LONG_TIMEOUT)

        return _wire.read_answer(await self._answered(request))

    async def _send(self, request: httpx.Request) -> dict[str, Any]:
        return _wire.read_answer(await self._answered(lambda: request))

    async def _answered(self, request: Callable[[], httpx.Request]) -> httpx.Response:
        """Send, and again where the server was away: every request is safe to repeat. Raises APIError."""
        failure: Exception | None = None
        for attempt in range(_wire.ATTEMPTS):
            if attempt:
                await asyncio.sleep(_wire.pause_before(attempt - 1))
            try:
                response = await self._http.send(request())
            except httpx.TransportError as error:
                failure = error
                continue
            if response.status_code not in _wire.RETRIED_STATUS or attempt == _wire.ATTEMPTS - 1:
                return _wire.checked(response)
        raise self._server.away(failure) from failure

    async def stream(self, path: str, after: int) -> AsyncGenerator[Event, None]:
        """Events after a position, each once and in order, across lost connections, until the session ends."""
        place = _wire.Resume(self._server, after)
        while not place.ended:
            failure: Exception | None = None
            try:
                headers = place.connect()
                async with self._http.stream("GET", path, headers=headers, timeout=_wire.STREAM_TIMEOUT) as response:
                    if response.is_success:
                        async for chunk in response.aiter_bytes():
                            for event in place.feed(chunk):
                                yield event
                    else:
                        await response.aread()
                        failure = _wire.refusal(response)
                        if response.status_code not in _wire.RETRIED_STATUS:
                            raise failure
            except httpx.TransportError as error:
                failure = error
            if not place.ended:
                await asyncio.sleep(place.pause(failure))


class AsyncSessions:
    """The sessions of a tenant: make, find and list them."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(
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
    ) -> AsyncSession:
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
        made = await self._client.post("/v1/sessions", body, key=idempotency_key)
        return AsyncSession(self._client, made["id"])

    async def get(self, session_id: str) -> AsyncSession:
        """The session of this id. Raises APIError (404) where there is none."""
        await self._client.get(f"/v1/sessions/{session_id}")
        return AsyncSession(self._client, session_id)

    async def import_(self, path: str | os.PathLike[str], *, idempotency_key: str | None = None) -> AsyncSession:
        """A new session from a file that `export` wrote: it goes on where that one stood. `missing_secrets` of it names
        the values that the file does not have."""
        made = await self._client.upload("/v1/sessions/import", path, key=idempotency_key)
        return AsyncSession(self._client, made["id"], missing_secrets=made["secrets"])

    async def list(self, *, limit: int = 50) -> AsyncIterator[SessionInfo]:
        """Every session of the tenant, newest first."""
        after: str | None = None
        while True:
            page = await self._client.get("/v1/sessions", {"limit": limit, **({"after": after} if after else {})})
            for row in page["data"]:
                yield SessionInfo.model_validate(row)
            if not page["has_more"]:
                return
            after = page["last_id"]


class AsyncSession:
    """One durable session. Its state lives on the server; this is a handle to it."""

    def __init__(self, client: AsyncClient, session_id: str, *, missing_secrets: Sequence[str] = ()) -> None:
        self._client = client
        self.id = session_id
        self.missing_secrets = tuple(missing_secrets)  # of one that was imported
        self._path = f"/v1/sessions/{session_id}"

    async def info(self) -> SessionInfo:
        """How the session stands now."""
        return SessionInfo.model_validate(await self._client.get(self._path))

    async def send(
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
        made = await self._client.post(f"{self._path}/events", body, key=idempotency_key)
        message_id: str = made["id"]
        return message_id

    def stream(self, after: int = 0) -> AsyncGenerator[Event, None]:
        """Follow the session's events from a position on until it ends. Reconnects by itself and misses nothing."""
        return self._client.stream(f"{self._path}/events/stream", after)

    async def run(
        self,
        content: str,
        *,
        tool_choice: str = "auto",
        max_tool_rounds: int = 8,
        on_busy: str | None = None,
    ) -> Turn:
        """Send a message and wait until the session rests again. Raises SessionFailed."""
        after = await self.position()
        sent = await self.send(content, tool_choice=tool_choice, max_tool_rounds=max_tool_rounds, on_busy=on_busy)
        turn = _wire.TurnReader(sent)
        async with contextlib.aclosing(self.stream(after)) as events:
            async for event in events:
                turn.feed(event)
                if turn.done:
                    break
        return turn.result()

    async def events(self, after: int = 0) -> list[Event]:
        """Every event after a position, up to now."""
        found: list[Event] = []
        while True:
            page = await self._client.get(f"{self._path}/events", {"after": after, "limit": 1000})
            found.extend(Event.model_validate(row) for row in page["data"])
            if not page["has_more"]:
                return found
            after = page["last_id"]

    async def position(self) -> int:
        """The position of the last event."""
        return (await self.info()).last_event

    async def steps(self) -> list[dict[str, Any]]:
        """Every step: its kind, state, attempts and tokens."""
        return await self._list("steps")

    async def attempts(self) -> list[dict[str, Any]]:
        """Every attempt at a step: on which node, from where it resumed, how it ended."""
        return await self._list("attempts")

    async def checkpoints(self) -> list[dict[str, Any]]:
        """Every checkpoint: what a session that is resumed starts from."""
        return await self._list("checkpoints")

    async def token_ids(self) -> list[int]:
        """The transcript's token ids."""
        return [token for segment in await self._list("transcript") for token in segment["token_ids"]]

    async def kv(self) -> dict[str, Any]:
        """Where the session's KV was last seen."""
        return await self._client.get(f"{self._path}/kv")

    @property
    def files(self) -> AsyncFiles:
        """The session's workspace."""
        return AsyncFiles(self._client, self._path)

    async def exec(
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
        made = await self._client.post(f"{self._path}/sandbox/exec?wait_s=20", body, key=idempotency_key)
        while made["state"] == "accepted":
            await asyncio.sleep(_wire.LOOK_EVERY_S)
            made = await self._client.get(f"{self._path}/sandbox/exec/{made['id']}")
        return Ran.model_validate(made)

    async def pin(self, *, ttl_s: float | None = None) -> Receipt:
        """Keep the session's pages on the device, for so many seconds if given."""
        return await self._intent("pin", ttl_s=ttl_s)

    async def offload(self, tier: str = "auto", *, wait: bool = False) -> Receipt:
        """Copy the session's pages to a tier (host, nvme, shared, or where the policy says); with `wait`, return once
        they are there."""
        return await self._intent("offload", tier=tier, wait=wait)

    async def prefetch(self, *, wait: bool = False) -> Receipt:
        """Bring the session's pages back to the device."""
        return await self._intent("prefetch", wait=wait)

    async def release_kv(self) -> Receipt:
        """Stop keeping the session's pages on the device."""
        return await self._intent("release")

    async def _intent(self, intent: str, **given: Any) -> Receipt:
        body = {name: value for name, value in given.items() if value is not None}
        return Receipt.model_validate(await self._client.post(f"{self._path}/kv/{intent}", body))

    async def export(self, path: str | os.PathLike[str], *, snapshots: str = "last") -> None:
        """Write the session to a file: its record and its workspace (`snapshots="all"`: every checkpoint's), without
        secrets and without KV."""
        await self._client.download(f"{self._path}/export", path, {"snapshots": snapshots})

    async def pause(self, *, wait: bool = True) -> SessionInfo:
        """Stop spending: a think stops at its last durable token, a tool runs to its end.

        As with all that is asked of a session: with `wait`, return once it is done.
        """
        return await self._command("pause", None, wait)

    async def resume(self, *, wait: bool = True) -> SessionInfo:
        """Go on where the session was paused."""
        return await self._command("resume", None, wait)

    async def retry(self, *, wait: bool = True) -> SessionInfo:
        """Go on at the step that failed."""
        return await self._command("retry", None, wait)

    async def interrupt(self, *, wait: bool = True) -> SessionInfo:
        """End the turn: what was sampled stays, calls that run are stopped, and the session rests."""
        return await self._command("interrupt", None, wait)

    async def rewind(
        self, step: int, *, seed: int | None = None, resume: bool = False, wait: bool = True
    ) -> SessionInfo:
        """Go back to the checkpoint of a step. With a `seed`, what is sampled from there on differs."""
        return await self._command("rewind", _wire.branch_body(step, seed, resume), wait)

    async def fork(
        self,
        step: int | None = None,
        *,
        seed: int | None = None,
        resume: bool = False,
        idempotency_key: str | None = None,
    ) -> AsyncSession:
        """A new session that begins as this one was at a checkpoint (the last by default); nothing is copied."""
        body = _wire.branch_body(step, seed, resume)
        made = await self._client.post(f"{self._path}/fork", body, key=idempotency_key)
        return AsyncSession(self._client, made["id"])

    async def complete(self, *, wait: bool = True) -> SessionInfo:
        """End a session that rests and free what it holds; with `wait`, return once that is true."""
        return await self._ended(await self._ask("complete"), wait)

    async def questions(self) -> list[Question]:
        """What the session waits for now."""
        return await self._client.questions(self.id)

    async def until(self, *states: str) -> SessionInfo:
        """Wait until the session is in one of these states, or has ended."""
        info = await self.info()
        wanted = {*states, "cancelled", "completed"}
        while info.state not in wanted:
            async with contextlib.aclosing(self.stream(info.last_event)) as events:
                async for event in events:
                    if event.type.startswith("session."):
                        break
            info = await self.info()
        return info

    async def cancel(self, *, wait: bool = True) -> SessionInfo:
        """Stop the session and free what it holds; with `wait`, return once that is true."""
        return await self._ended(await self._ask("cancel"), wait)

    async def _command(self, verb: str, body: Mapping[str, Any] | None, wait: bool) -> SessionInfo:
        before = await self.position()
        made = await self._client.post(f"{self._path}/{verb}", body)
        if not wait:
            return SessionInfo.model_validate(made)
        async with contextlib.aclosing(self.stream(before)) as events:
            async for event in events:
                if event.data.get("command_id") == made["command"]:
                    _wire.ensure_applied(event)
                    break
        return await self.info()

    async def _ask(self, verb: str, body: Mapping[str, Any] | None = None) -> SessionInfo:
        return SessionInfo.model_validate(await self._client.post(f"{self._path}/{verb}", body))

    async def _ended(self, info: SessionInfo, wait: bool) -> SessionInfo:
        """The session once nothing of it is left, if that is to be waited for."""
        ends = info.ending is not None or info.state == "cancelling"
        if wait and ends and info.state not in ("cancelled", "completed"):
            async for _ in self.stream(info.last_event):
                pass
            info = await self.info()
        return info

    async def _list(self, what: str) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = (await self._client.get(f"{self._path}/{what}"))["data"]
        return data
