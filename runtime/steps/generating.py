"""The engine at work for one think, and what it samples made durable as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine import Done, Logprob, Preempted, Prefill, Resumed, Sampling, Speculation, Tokens
from engine import Event as EngineEvent
from engine.tokens import ArgumentsDelta, CallStarted, ChatFormat, MessageParser
from runtime.config import SessionConfig
from runtime.errors import InvalidRequest
from runtime.generation import Sampling as Options
from runtime.steps import measuring
from runtime.steps.measuring import Measure
from runtime.steps.services import Services
from runtime.store import budgets, events, fleet, steps
from runtime.store.values import Attempt, Event, Owner, Session
from runtime.tools.catalog import Catalog
from runtime.tools.redacting import NOTHING, Redactor

FLUSH_EVERY_S = 0.04
CHOICES = ("auto", "none", "required")  # anything else is a tool's name


@dataclass(frozen=True)
class Ask:
    """What a think wants of the engine. `prompt`: the transcript up to what is sampled; `sampled`: durable tokens of
    the think itself; `known`: tokens of the prompt that once had their KV."""

    session: Session
    step_no: int
    attempt_no: int
    config: SessionConfig
    tools: Catalog
    tool_choice: str
    prompt: list[int]
    sampled: list[int]
    known: int
    measure: Measure
    redactor: Redactor = NOTHING  # of what is shown; the transcript is as it was sampled
    seed: int | None = None  # of the turn; None: the session's

    @property
    def fits(self) -> bool:
        """Whether there is room for one more token, or may be."""
        return len(self.prompt) + len(self.sampled) < self.measure.most

    def arguments(self, chat: ChatFormat) -> dict[str, Any]:
        """Of `EngineClient.generate`. Blocking: a grammar that is new takes some 10 ms to be checked."""
        session, sampling, sampled = self.session, self.config.sampling, len(self.sampled)
        within = budgets.left(session, "tokens")
        left = self.config.limits.max_think_tokens - self.measure.tokens(sampled)
        longest = self.measure.longest(left if within is None else min(left, int(within)), len(self.prompt) + sampled)
        choice = self.tool_choice if self.tool_choice in CHOICES else {"name": self.tool_choice}
        form = self.config.response_format.form if self.config.response_format is not None else None
        return {
            "request_id": f"{session.session_id}/{self.step_no}/{self.attempt_no}",
            "session": session.session_id,
            "epoch": session.epoch,
            "token_ids": [*self.prompt, *self.sampled],
            "max_tokens": longest,
            "sampling": drawing(sampling, session.seed if self.seed is None else self.seed),
            "grammar": chat.tool_grammar(self.tools.specs, choice, form, self.config.parallel_tool_calls),
            "stop": sampling.stop,
            "logprobs": sampling.logprobs,
            "speculation": Speculation(sampling.speculation),
            "replay": sampled,
            "salt": session.salt,
            "known_tokens": len(self.prompt) + sampled - 1 if sampled else min(self.known, len(self.prompt)),
        }


def drawing(options: Options, seed: int) -> Sampling:
    """The options as the engine takes them."""
    return Sampling(
        options.temperature,
        options.top_k,
        options.top_p,
        seed,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=tuple(sorted((int(token), bias) for token, bias in options.logit_bias.items())),
    )


@dataclass
class End:
    """What a think has sampled: `sampled` is durable, `rest` becomes so with the step's end. `kv_tokens` and `kv_keys`
    are of the session's pages; None where the engine had nothing to do. `spent`: what the budget counts already of what
    this attempt sampled."""

    sampled: list[int]
    rest: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)  # of `rest`, where they are asked for
    finish: dict[str, Any] = dataclasses.field(default_factory=lambda: {"finish_reason": "stop", "resumed": True})
    kv_tokens: int = 0
    kv_keys: Sequence[str] | None = None
    spent: int = 0
    appended: int = 0  # of `sampled`, by this attempt

    @property
    def whole(self) -> list[int]:
        return [*self.sampled, *self.rest]


class Generation:
    """A generation that runs. Until `take` nothing of it is kept, so it may begin before its think has: computing
    writes nothing, and whoever may not write is told so when the think begins."""

    def __init__(self, s: Services, ask: Ask) -> None:
        """Raises InvalidRequest where the context is full."""
        if not ask.fits:
            raise InvalidRequest(
                f"the context is full: {len(ask.prompt)} tokens of {ask.measure.most}; start a new session",
                code="context_length_exceeded",
            )
        self._s, self._ask = s, ask
        self._received = _Received()
        self._began = False
        self._receiving = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        arguments = await asyncio.to_thread(self._ask.arguments, self._s.chat)
        await self._s.coming_back.asked(self._ask.session.session_id)
        client = await self._s.engine.client()
        await self._received.take(client.generate(**arguments))

    async def stop(self) -> None:
        """Whatever it does, it ends now. Idempotent."""
        self._receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._receiving

    async def take(self, owner: Owner, attempt: Attempt) -> End:
        """Append what arrives, at most once per FLUSH_EVERY_S, until there is no more. What came with the end is left
        to the step's end, which follows at once."""
        received, receiving, sampled = self._received, self._receiving, list(self._ask.sampled)
        receiving.add_done_callback(lambda _: received.changed.set())
        ask = self._ask
        shown = Shown(self._s.chat, ask.redactor, sampled, ask.config.sampling.stop, calls=bool(ask.config.tools))
        spent, card = 0, self._s.engine.card
        while (received.waiting and received.done is None) or not receiving.done():
            await received.changed.wait()
            received.changed.clear()
            await self._tell(owner, attempt)
            while received.waiting and received.done is None:
                started = time.monotonic()
                batch = received.waiting[:]
                likely = told_logprobs(received.logprobs[: len(batch)])
                told = shown.push(batch)
                db, offset = self._s.db, len(sampled)
                counts = measuring.spent(card, len(batch))
                await steps.append_tokens(db, owner, attempt, offset, batch, told.text, likely, told.calls, counts)
                spent += counts
                del received.waiting[: len(batch)], received.logprobs[: len(batch)]
                sampled.extend(batch)
                if not receiving.done():  # more will come, or the end, which nothing waits for
                    await asyncio.wait([receiving], timeout=max(0.0, FLUSH_EVERY_S - (time.monotonic() - started)))
        await receiving
        await self._tell(owner, attempt)  # all of it may have come before anybody looked
        done = received.done
        assert done is not None
        finish = {name: value for name, value in dataclasses.asdict(done).items() if not name.startswith("kv_")}
        finish["kv"] = received.source()
        if finish.pop("usage") is not None:
            finish |= counted_elsewhere(done)
        kv, appended = (done.kv_tokens, done.kv_keys), len(sampled) - len(ask.sampled)
        return End(sampled, received.waiting, received.logprobs, finish, *kv, spent, appended)

    async def _tell(self, owner: Owner, attempt: Attempt) -> None:
        """Where the session's pages are, once they are there; and what became of them."""
        if not self._began and self._received.prefill is not None:
            self._began = True
            card = self._s.engine.card
            at = ("external", {"server": card.server}) if card.external else ("device", self._received.source())
            await fleet.note_residency(self._s.db, owner.session_id, attempt.session.tenant_id, *at)
        notes, self._received.notes = self._received.notes, []
        if notes:
            await events.write(self._s.db, owner.session_id, notes, epoch=owner.epoch, step_no=attempt.step_no)


def counted_elsewhere(done: Done) -> dict[str, Any]:
    """What the account of a step has where a model server did the work: its count, and whose the KV was."""
    usage = dict(done.usage or {})
    new = max(0, usage["prompt_tokens"] - usage["cached_tokens"])
    kv = {"external": usage["cached_tokens"], "computed": new}
    return {"usage": usage, "generated": usage["completion_tokens"], "exact": False, "kv": kv}


class Told(NamedTuple):
    """What events tell of some tokens: their text, and of calls in it the names and the arguments as they come."""

    text: str
    calls: list[dict[str, Any]]


class Shown:
    """The text of sampled tokens as events tell it. `before`: those that were durable, and have been told; `calls`:
    whether calls are looked for."""

    def __init__(
        self,
        chat: ChatFormat,
        redactor: Redactor,
        before: Sequence[int],
        stops: Sequence[str] = (),
        *,
        calls: bool = False,
    ) -> None:
        self._text = chat.written(stops)
        self._mask = redactor.stream()
        self._parser = MessageParser(chat.calls) if calls else None
        self.push(before)

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> Told:
        """What may be the beginning of a secret or of a stop text is told with what follows it, or with the `last`."""
        text = self._text.push(token_ids) + (self._text.finish() if last else "")
        if self._mask is not None:
            shown = self._mask.read(text.encode("utf-8", "replace")) + (self._mask.rest() if last else b"")
            text = shown.decode("utf-8", "replace")
        if self._parser is None:
            return Told(text, [])
        calls: list[dict[str, Any]] = []
        for delta in self._parser.push(text):
            if isinstance(delta, CallStarted):
                calls.append({"index": delta.index, "name": delta.name, "arguments": ""})
            elif isinstance(delta, ArgumentsDelta):
                if not calls or calls[-1]["index"] != delta.index:
                    calls.append({"index": delta.index, "arguments": ""})
                calls[-1]["arguments"] += delta.text
        return Told(text, calls)


def told_logprobs(given: Sequence[Logprob]) -> list[dict[str, Any]] | None:
    """As events tell them; None: they were not asked for."""
    if not given:
        return None
    return [
        {"logprob": one.logprob, "top": [{"token_id": token, "logprob": value} for token, value in one.top]}
        for one in given
    ]


class _Received:
    """What the engine has sent and Postgres has not taken yet; the engine never waits for Postgres."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.logprobs: list[Logprob] = []  # of those that wait, if any
        self.prefill: Prefill | None = None
        self.notes: list[Event] = []  # where the KV went and came from meanwhile
        self.done: Done | None = None
        self.changed = asyncio.Event()

    async def take(self, generation: AsyncIterator[EngineEvent]) -> None:
        try:
            async for event in generation:
                if isinstance(event, Tokens):
                    self.waiting.extend(event.ids)
                    self.logprobs.extend(event.logprobs or ())
                elif isinstance(event, Prefill):
                    self.prefill = event
                    self.notes += _sources(event)
                elif isinstance(event, Preempted):
                    self.notes.append(Event("kv.preempted", {"tokens": event.tokens, "pages": event.pages}))
                elif isinstance(event, Resumed):
                    self.notes += _sources(event)
                else:
                    self.done = event
                self.changed.set()
        finally:
            self.changed.set()

    def source(self) -> dict[str, int]:
        return dataclasses.asdict(self.prefill) if self.prefill else {}


def _sources(prefill: Prefill | Resumed) -> list[Event]:
    """Where the session's KV came from: restored tokens equal never-evicted ones, recomputed ones are named."""
    notes = []
    places = {"host": prefill.host, "nvme": prefill.nvme, "shared": prefill.shared}
    if restored := sum(places.values()):
        notes.append(Event("kv.restored", {"tokens": restored, **places}))
    if prefill.recomputed:
        notes.append(Event("kv.recomputed", {"tokens": prefill.recomputed}))
    return notes
