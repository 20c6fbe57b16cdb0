"""The token-level protocol in front of a model server: a `generate` is one request there, and pages are its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from engine.errors import EngineError, RequestError, ServerUnavailable
from engine.external.answer import Answer
from engine.external.figures import Figures
from engine.external.kinds import body_of
from engine.external.look import Served
from engine.external.remote import Remote
from engine.external.transcript import Conversation, read
from engine.fields import Fields
from engine.hints import parse_envelope
from engine.kvcall import parse_kv
from engine.reports import parse_audit
from engine.request import GenerateSpec, parse_generate
from engine.sockets import Connection, Frame, FrameServer, error_frame
from engine.wire import ModelCard

_EPOCHS_KEPT = 65_536
_NOTHING = {"device": 0, "host": 0, "nvme": 0, "shared": 0, "recomputed": 0, "computed": 0}
_BYTES_PER_TOKEN = 4  # where a server does not count


class ExternalServer(FrameServer):
    """Speaks for one model of one server."""

    def __init__(self, card: ModelCard, remote: Remote, served: Served) -> None:
        super().__init__(card)
        self._remote, self._served = remote, served
        self._figures = Figures()
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # by request_id: session, and what runs
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def left(self, request_id: str, handle: Any) -> None:
        handle.cancel()

    async def dispatch(self, connection: Connection, call_id: Any, message: Frame) -> None:
        kind = message.get("type")
        if kind == "hello":
            connection.push({"type": "hello", "id": call_id, **self.card.as_message()})
        elif kind == "generate":
            self._begin(connection, call_id, parse_generate(message))
        else:
            connection.push({"type": "result", **await self._answer(str(kind), message), "id": call_id})

    async def _answer(self, kind: str, message: Frame) -> dict[str, Any]:
        fields = Fields(message)
        if kind == "cancel":
            return {"cancelled": await self._cancel(fields.text("request_id"))}
        if kind == "kv":
            call = parse_kv(message)
            self._fence(call.session, call.epoch)
            if call.intent == "drop":
                await self._cancel_session(call.session)
            return self._receipt()
        if kind == "kv_state":
            counts = {f"{tier}_pages": 0 for tier in ("device", "host", "nvme", "shared")}
            return {"session": fields.text("session"), "tokens": 0, **counts, "pinned": False, "keys": [], "bytes": {}}
        if kind == "kv_hints":
            hints = parse_envelope(message).hints
            return {"receipts": [{**self._receipt(), "action_id": hint.action_id} for hint in hints]}
        if kind == "delete_keys":
            fields.keys("keys")
            return {**self._receipt(), "status": "missing"}
        if kind == "learn":
            return {"learned": len(fields.salts("salts"))}
        if kind == "decisions":
            return {"version": 0, "decisions": []}
        if kind == "audit":
            parse_audit(message)
            nothing: dict[str, Any] = {name: [] for name in ("findings", "sessions", "held", "device")}
            return {**nothing, "pages": 0, "bytes": 0, "tiers": {}, "integrity": "ok"}
        if kind == "stats":
            return self._figures.stats(len(self._running), len({session for session, _ in self._running.values()}))
        if kind == "spans":
            return self._figures.spans()
        raise RequestError("bad_request", f"type is {kind!r}, which is none of the protocol's")

    def _receipt(self) -> dict[str, Any]:
        detail = f"the KV is the model server's own ({self._served.kind.name}); where it is, it does not say"
        return {"status": "external", "pages": 0, "bytes": 0, "ms": 0.0, "detail": detail, "tier": None}

    # -- one generation -----------------------------------------------------------------------------------------------

    def _begin(self, connection: Connection, call_id: Any, spec: GenerateSpec) -> None:
        if spec.request_id in self._running:
            raise RequestError("duplicate_request", f"request {spec.request_id!r} is already running")
        conversation, asked = read(spec.token_ids), _asked(spec.grammar)
        if bool(conversation.begun) != bool(spec.replay):
            raise RequestError("bad_request", "replay is of a message that was begun, and of nothing else")
        body = body_of(self._served.kind, self._served.model, conversation, spec, asked)
        if self._fence(spec.session, spec.epoch):
            for session, task in self._running.values():
                if session == spec.session:
                    task.cancel()

        def push(frame: Frame) -> None:
            connection.push({**frame, "request_id": spec.request_id, "id": call_id})

        task = asyncio.create_task(self._generate(push, spec, conversation, body))
        self._running[spec.request_id] = (spec.session, task)
        connection.requests[spec.request_id] = task

        def ended(_: asyncio.Task[None]) -> None:
            self._running.pop(spec.request_id, None)
            connection.requests.pop(spec.request_id, None)

        task.add_done_callback(ended)

    async def _generate(self, push: Any, spec: GenerateSpec, conversation: Conversation, body: dict[str, Any]) -> None:
        telling = _Telling(push, Answer(conversation.begun), self._figures)
        try:
            await self._stream(telling, body)
            push(telling.done(spec))
        except asyncio.CancelledError:
            push(telling.done(spec, cancelled=True))
        except EngineError as error:
            if isinstance(error, ServerUnavailable):
                self._figures.lost += 1
            else:
                self._figures.refused += 1
            push(error_frame(None, error))
        except Exception as error:  # ours: the node must hear of it, and not wait for ever
            push(error_frame(None, RequestError("bad_answer", f"the answer could not be read: {error!r}")))
            raise

    async def _stream(self, telling: _Telling, body: dict[str, Any]) -> None:
        chunks = self._remote.chunks(body)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                telling.take(chunk)
        telling.finish()

    async def _cancel(self, request_id: str) -> bool:
        """Returns when it has ended, and said so."""
        _, task = self._running.get(request_id, ("", None))
        if task is None:
            return False
        task.cancel()
        await asyncio.wait([task])
        return True

    async def _cancel_session(self, session: str) -> None:
        tasks = [task for running, task in self._running.values() if running == session]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _fence(self, session: str, epoch: int) -> bool:
        """Whether the epoch is newer than any before. Raises RequestError (stale_epoch) for an older one."""
        known = self._epochs.get(session, 0)
        if epoch < known:
            raise RequestError("stale_epoch", f"session {session!r} is at epoch {known}; epoch {epoch} has ended")
        self._epochs[session] = epoch
        self._epochs.move_to_end(session)
        while len(self._epochs) > _EPOCHS_KEPT:
            self._epochs.popitem(last=False)
        return epoch > known


class _Telling:
    """One answer on its way to the node, and the clock beside it."""

    def __init__(self, push: Any, answer: Answer, figures: Figures) -> None:
        self._push, self._answer, self._figures = push, answer, figures
        self._began_s = self._latest_s = time.monotonic()
        self._first_s: float | None = None
        self._generated = 0
        self._reason = "stop"

    def take(self, chunk: Any) -> None:
        told = self._answer.take(chunk)
        if self._first_s is None:
            self._push({"type": "prefill", **_NOTHING})
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
            self._figures.metrics.first_token_s.observe(now - self._began_s)
        elif told:
            self._figures.metrics.inter_token_s.observe(now - self._latest_s)
        self._latest_s = now
        self._tell(told)

    def finish(self) -> None:
        told, self._reason = self._answer.finish()
        self._tell(told)

    def done(self, spec: GenerateSpec, *, cancelled: bool = False) -> Frame:
        now, first = time.monotonic(), self._first_s
        usage = self._usage(spec)
        self._figures.note(usage)
        ttft_ms = None if first is None else round(1e3 * (first - self._began_s), 3)
        return {
            "type": "done",
            "finish_reason": "cancelled" if cancelled else self._reason,
            "generated": self._generated,
            "ttft_ms": ttft_ms,
            "prefill_ms": ttft_ms,
            "decode_ms": None if first is None else round(1e3 * (now - first), 3),
            "kv_tokens": 0,
            "kv_keys": [],
            "replayable": False,
            "usage": usage,
        }

    def _usage(self, spec: GenerateSpec) -> dict[str, Any]:
        """As the server says it; else about as much."""
        if self._answer.usage is not None:
            return dict(self._answer.usage)
        prompt = len(spec.token_ids) // _BYTES_PER_TOKEN
        told = {"prompt_tokens": prompt, "cached_tokens": 0, "completion_tokens": self._answer.deltas}
        return {**told, "estimated": True}

    def _tell(self, tokens: list[int]) -> None:
        if tokens:
            self._generated += len(tokens)
            self._push({"type": "tokens", "ids": tokens})


def _asked(grammar: str | None) -> Mapping[str, Any]:
    """What `ByteChat.tool_grammar` wrote."""
    if grammar is None:
        return {}
    try:
        asked = json.loads(grammar)
    except (ValueError, RecursionError) as error:
        raise RequestError("bad_grammar", "the grammar is none that a model server could be asked for") from error
    if not isinstance(asked, dict) or set(asked) - {"tool_choice", "parallel_tool_calls", "response_format"}:
        raise RequestError("bad_grammar", "the grammar is none that a model server could be asked for")
    return asked
