"""Sockets in front of the compute thread. A slow or vanished reader costs the engine nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.constraint import Constraints
from engine.core import EngineCore
from engine.errors import EngineError, RequestError
from engine.fields import Fields
from engine.hinted import Hinted
from engine.hints import parse_envelope
from engine.intents import Intents
from engine.kvcall import parse_kv
from engine.live import Guides
from engine.memory_use import MemoryUse
from engine.reports import Reports, parse_audit
from engine.request import GenerateSpec, parse_generate
from engine.sockets import Connection, Frame, FrameServer, error_frame
from engine.wire import ModelCard


class EngineServer(FrameServer):
    """Speaks the token-level protocol for one engine core."""

    def __init__(
        self,
        core: EngineCore,
        intents: Intents,
        constraints: Constraints,
        card: ModelCard,
        memory: MemoryUse | None = None,
    ) -> None:
        super().__init__(card)
        self._core = core
        self._intents = intents
        self._hinted = Hinted(intents)
        self._reports = Reports(core, intents.keeper, memory)
        self._constraints = constraints

    def left(self, request_id: str, handle: Any) -> None:
        self._core.post(partial(self._core.cancel, request_id, handle))

    async def dispatch(self, connection: Connection, call_id: Any, message: Frame) -> None:
        kind = message.get("type")
        reply = self._replier(connection, call_id)
        if kind == "hello":
            connection.push({"type": "hello", "id": call_id, **self.card.as_message()})
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
                sink(error_frame(call_id, error))

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
                reply(error_frame(None, error))

        self._core.post(run)


def _from_thread(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
        loop.call_soon_threadsafe(call)
