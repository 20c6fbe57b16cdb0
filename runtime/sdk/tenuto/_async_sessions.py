"""Sessions, as the asyncio client offers them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from tenuto import _wire
from tenuto._async_turns import AsyncAnswers, AsyncRunningTurn
from tenuto._files import AsyncFiles
from tenuto._tool import Given, bound
from tenuto._turns import HOLDS_QUESTIONS, RESTING, Approve, asked
from tenuto.errors import APIError, TenutoError
from tenuto.models import Event, Question, Ran, Receipt, SessionInfo, Turn

if TYPE_CHECKING:
    from tenuto._async import AsyncClient


class AsyncSessions:
    """The sessions of a tenant: make, find and list them."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(
        self,
        *,
        model: str = "",
        system: str | None = None,
        tools: Sequence[Given] | None = None,
        files: Mapping[str, str] | None = None,
        limits: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
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

        `tools`: names of built-in ones, tools of your own, or functions (see `tenuto.tool`), which run here; `files`:
        its first workspace; `approvals`: tools whose calls wait for a person; `budget`: what it may use in all;
        `sampling`: how tokens are drawn, `stop` and `logprobs` among it; `response_format`: what answers must be;
        `on_busy`: what a message does that comes while it works; `context_policy`: what gives way in a full context;
        `egress`: hosts that its sandbox may reach; `image`: what its sandbox is made of; `agent`: a name, or `name@3`,
        which says whatever is not said here. Of functions, only those given here run, not those an agent names.
        """
        more: dict[str, Any] = {
            "response_format": response_format,
            "parallel_tool_calls": parallel_tool_calls,
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
        return AsyncSession(self._client, made["id"], tools=tools)

    async def get(self, session_id: str, *, tools: Sequence[Given] | None = None) -> AsyncSession:
        """The session of this id; its calls of these functions run here. Raises APIError (404) where there is none."""
        session = AsyncSession(self._client, session_id, tools=tools)
        await session.info()
        return session

    async def import_(
        self,
        path: str | os.PathLike[str],
        *,
        tools: Sequence[Given] | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncSession:
        """A new session from a file that `export` wrote: it goes on where that one stood. `missing_secrets` of it names
        the values that the file does not have."""
        made = await self._client.upload("/v1/sessions/import", path, key=idempotency_key)
        return AsyncSession(self._client, made["id"], tools=tools, missing_secrets=made["secrets"])

    async def list(
        self, *, limit: int = 50, agent: str | None = None, state: str | Sequence[str] | None = None
    ) -> AsyncIterator[SessionInfo]:
        """Every session of the tenant, newest first; of an agent (`name`, or `name@3`), in a state or any of several.
        `limit`: of a page."""
        asked = _wire.given(limit=limit, agent=agent, state=state)
        while True:
            page = await self._client.get("/v1/sessions", asked)
            for row in page["data"]:
                yield SessionInfo.model_validate(row)
            if not page["has_more"]:
                return
            asked["after"] = page["last_id"]


class AsyncSession:
    """One durable session. Its state lives on the server; this is a handle to it.

    As a context manager it ends the session: completed where the block ends in order and the session rests, else
    cancelled.
    """

    def __init__(
        self,
        client: AsyncClient,
        session_id: str,
        *,
        tools: Sequence[Given] | None = None,
        missing_secrets: Sequence[str] = (),
    ) -> None:
        self._client = client
        self.id = session_id
        self.missing_secrets = tuple(missing_secrets)  # of one that was imported
        self._path = f"/v1/sessions/{_wire.segment(session_id)}"
        self._tools = bound(tools)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:  # what went wrong is to be seen, not that ending it failed too
            with contextlib.suppress(TenutoError):
                await self.cancel(wait=False)
            return
        try:
            await self.complete()
        except APIError as error:
            if error.status != 409:
                raise
            await self.cancel()  # it does not rest

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

    def stream(self, after: int = 0, *, watch: Callable[[], None] | None = None) -> AsyncGenerator[Event, None]:
        """Follow the session's events from a position on until it ends. Reconnects by itself and misses nothing.

        `watch` is called whenever the server says anything, every few seconds at least; what it raises ends the stream.
        """
        return self._client.stream(f"{self._path}/events/stream", after, watch)

    async def run(
        self,
        content: str,
        *,
        tool_choice: str = "auto",
        max_tool_rounds: int = 8,
        on_busy: str | None = None,
        approve: Approve | None = None,
    ) -> Turn:
        """Send a message and wait until the session rests again. Raises SessionFailed, NeedsAnswer.

        Calls of the session's functions run meanwhile, several at once. `approve` is asked of each call that waits for
        a person's word, with the Question, and gives True, False or `("decline", reason)`; it may be async.
        """
        message = {"content": content, "tool_choice": tool_choice, "max_tool_rounds": max_tool_rounds}
        async with AsyncRunningTurn(self, {**message, "on_busy": on_busy}, approve) as turn:
            return await turn.result()

    def turn(
        self,
        content: str,
        *,
        tool_choice: str = "auto",
        max_tool_rounds: int = 8,
        on_busy: str | None = None,
        approve: Approve | None = None,
    ) -> AsyncRunningTurn:
        """As `run`, with the events as they come: `async with session.turn(...) as turn`, `async for event in turn`.

        `await turn.result()` is what `run` returns. Leaving it early leaves the session working.
        """
        message = {"content": content, "tool_choice": tool_choice, "max_tool_rounds": max_tool_rounds}
        return AsyncRunningTurn(self, {**message, "on_busy": on_busy}, approve)

    async def serve(self, *, approve: Approve | None = None) -> SessionInfo:
        """Answer what the session waits for until it rests, with no message of its own: so a turn goes on in another
        process, from `sessions.get(id, tools=[...])`. Raises NeedsAnswer."""
        answers = self._answers(approve)
        try:
            while (info := await self.info()).state not in RESTING:
                if info.state in HOLDS_QUESTIONS:
                    for question in await self.questions():
                        await answers.give(question.id)
                async with contextlib.aclosing(self.stream(info.last_event, watch=answers.check)) as events:
                    async for event in events:
                        if (asked_for := asked(event)) is not None:
                            await answers.give(asked_for)
                        if event.type.startswith("session."):
                            break
            return info
        finally:
            await answers.leave()

    def _answers(self, approve: Approve | None) -> AsyncAnswers:
        return AsyncAnswers(self._client, self._tools, approve)

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
        return AsyncSession(self._client, made["id"], tools=[*self._tools.values()])

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
