"""One think: sampled tokens made durable as they come, resumed after the last durable one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import Done, Preempted, Prefill, Resumed, Sampling, Tokens
from engine import Event as EngineEvent
from engine.tokens import StreamDecoder, tool_grammar
from runtime.config import SessionConfig
from runtime.errors import InvalidRequest
from runtime.steps import checkpoints
from runtime.steps.compacting import warning
from runtime.steps.listing import catalog
from runtime.steps.reading import Reading, read
from runtime.steps.recent import Past, past
from runtime.steps.services import Services
from runtime.store import budgets, events, fleet, steps
from runtime.store.standing import Standing
from runtime.store.values import Attempt, Event, Owner, Sampled, Segment
from runtime.tools.catalog import Catalog
from workflows.contract import StepIn, ThinkIn
from workflows.states import Event as Move

FLUSH_EVERY_S = 0.04
CHOICES = ("auto", "none", "required")  # anything else is a tool's name


async def think(s: Services, what: ThinkIn, execution: str) -> Standing | None:
    """Where the session stands after it; None where that is for the record to say."""
    owner = s.owner(what.session_id, what.epoch)
    opening = Segment("scaffold", s.chat.assistant_open())
    attempt, behind = await asyncio.gather(
        steps.begin(s.db, owner, what.step_no, "think", Move.THINK, token=execution, opening=opening),
        past(s.db, s.recent, what),
    )
    if attempt.done is not None or attempt.held:
        return None
    config = SessionConfig.model_validate(attempt.session.config)
    tools, _ = await catalog(s, what.session_id, config)
    try:
        end = _End(list(attempt.model_tokens))
        if not _ended(s, end.sampled, config):
            prompt = [*behind.tokens, *opening.token_ids]
            end = await _generate(s, owner, attempt, config, tools, what.tool_choice, prompt, end.sampled, behind.known)
        if not _ended(s, end.whole, config) and budgets.left(attempt.session, "tokens") is not None:
            await _keep(s, owner, attempt, end)
            if await steps.hold_for_budget(s.db, owner, attempt):
                return None  # it goes on after its last durable token, once there is more
        return await _complete(s, owner, attempt, behind, end, _read(s, tools, end.whole, what))
    except asyncio.CancelledError:
        await asyncio.shield(steps.abandon(s.db, owner, attempt, "cancelled", "the think was cancelled"))
        raise


@dataclass
class _End:
    """What a think has sampled: `sampled` is durable, `rest` becomes so with the step's end. `kv_tokens` and `kv_keys`
    are of the session's pages; None where the engine had nothing to do."""

    sampled: list[int]
    rest: list[int] = field(default_factory=list)
    finish: dict[str, Any] = field(default_factory=lambda: {"finish_reason": "stop", "resumed": True})
    kv_tokens: int = 0
    kv_keys: Sequence[str] | None = None

    @property
    def whole(self) -> list[int]:
        return [*self.sampled, *self.rest]


async def _keep(s: Services, owner: Owner, attempt: Attempt, end: _End) -> None:
    """Make the rest durable by itself."""
    if (last := _last(s, end)) is not None:
        await steps.append_tokens(s.db, owner, attempt, last.offset, last.token_ids, last.text)
        end.sampled, end.rest = end.whole, []


def _last(s: Services, end: _End) -> Sampled | None:
    if not end.rest:
        return None
    decoder = StreamDecoder(s.tokenizer)
    decoder.push(end.sampled)
    return Sampled(len(end.sampled), end.rest, decoder.push(end.rest))


def _read(s: Services, tools: Catalog, sampled: list[int], what: ThinkIn) -> Reading:
    ended = bool(sampled) and sampled[-1] in s.engine.card.eos_token_ids
    return read(s.chat.parse_assistant(sampled), ended, tools.names, what.tool_choice, what.corrections)


async def interrupt_think(s: Services, owner: Owner, what: StepIn, execution: str) -> bool:
    """End the think that runs with what is durable of it. False: that is nothing."""
    attempt = await steps.begin(s.db, owner, what.step_no, "think", None, token=execution, stopping=True)
    if attempt.done is not None:
        return True
    if not attempt.model_tokens:
        return False
    behind = await past(s.db, s.recent, what)
    end = _End(attempt.model_tokens, finish={"finish_reason": "interrupted", "resumed": True})
    reading = Reading("interrupted", s.chat.parse_assistant(end.sampled).text)
    await _complete(s, owner, attempt, behind, end, reading)
    return True


def _ended(s: Services, sampled: list[int], config: SessionConfig) -> bool:
    return bool(sampled) and (
        sampled[-1] in s.engine.card.eos_token_ids or len(sampled) >= config.limits.max_think_tokens
    )


async def _generate(
    s: Services,
    owner: Owner,
    attempt: Attempt,
    config: SessionConfig,
    tools: Catalog,
    tool_choice: str,
    prompt: list[int],
    sampled: list[int],
    known: int,
) -> _End:
    """Run the engine from the last durable token; `sampled` grows as tokens become durable. `known`: tokens that had
    their KV when the step began anew."""
    within = budgets.left(attempt.session, "tokens")
    room = s.engine.card.context_length - len(prompt) - len(sampled)
    if room <= 0:
        raise InvalidRequest(
            f"the context is full: {len(prompt)} tokens of {s.engine.card.context_length}; start a new session",
            code="context_length_exceeded",
        )
    await s.coming_back.asked(owner.session_id)
    client = await s.engine.client()
    sampling = config.sampling
    generation = client.generate(
        request_id=f"{owner.session_id}/{attempt.step_no}/{attempt.attempt_no}",
        session=owner.session_id,
        epoch=owner.epoch,
        token_ids=[*prompt, *sampled],
        max_tokens=min(config.limits.max_think_tokens - len(sampled), room, room if within is None else int(within)),
        sampling=Sampling(sampling.temperature, sampling.top_k, sampling.top_p, attempt.session.seed),
        grammar=tool_grammar(tools.specs, tool_choice if tool_choice in CHOICES else {"name": tool_choice}),
        replay=len(sampled),
        salt=attempt.session.salt,
        known_tokens=len(prompt) + len(sampled) - 1 if sampled else min(known, len(prompt)),
    )
    received = _Received()
    receiving = asyncio.create_task(received.take(generation))
    try:
        await _drain(s, owner, attempt, received, receiving, sampled)
        await receiving
    finally:
        receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await receiving
    done = received.done
    assert done is not None
    finish = {name: value for name, value in dataclasses.asdict(done).items() if not name.startswith("kv_")}
    finish["kv"] = received.source()
    return _End(sampled, received.waiting, finish, done.kv_tokens, done.kv_keys)


class _Received:
    """What the engine has sent and Postgres has not taken yet; the engine never waits for Postgres."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.prefill: Prefill | None = None
        self.notes: list[Event] = []  # where the KV went and came from meanwhile
        self.done: Done | None = None
        self.changed = asyncio.Event()

    async def take(self, generation: AsyncIterator[EngineEvent]) -> None:
        try:
            async for event in generation:
                if isinstance(event, Tokens):
                    self.waiting.extend(event.ids)
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


async def _drain(
    s: Services,
    owner: Owner,
    attempt: Attempt,
    received: _Received,
    receiving: asyncio.Task[None],
    sampled: list[int],
) -> None:
    """Append what arrives, at most once per FLUSH_EVERY_S, until there is no more. What came with the end is left to
    the step's end, which follows at once."""
    decoder = StreamDecoder(s.tokenizer)
    decoder.push(sampled)  # what was durable before has been shown
    told = False
    while (received.waiting and received.done is None) or not receiving.done():
        await received.changed.wait()
        received.changed.clear()
        if not told and received.prefill is not None:
            told = True
            await fleet.note_residency(s.db, owner.session_id, attempt.session.tenant_id, "device", received.source())
        await _tell(s, owner, attempt, received)
        while received.waiting and received.done is None:
            started = time.monotonic()
            batch = received.waiting[:]
            await steps.append_tokens(s.db, owner, attempt, len(sampled), batch, decoder.push(batch))
            del received.waiting[: len(batch)]
            sampled.extend(batch)
            if not receiving.done():  # more will come, or the end, which nothing waits for
                await asyncio.wait([receiving], timeout=max(0.0, FLUSH_EVERY_S - (time.monotonic() - started)))


async def _tell(s: Services, owner: Owner, attempt: Attempt, received: _Received) -> None:
    notes, received.notes = received.notes, []
    if notes:
        await events.write(s.db, owner.session_id, notes, epoch=owner.epoch, step_no=attempt.step_no)


def _sources(prefill: Prefill | Resumed) -> list[Event]:
    """Where the session's KV came from: restored tokens equal never-evicted ones, recomputed ones are named."""
    notes = []
    places = {"host": prefill.host, "nvme": prefill.nvme, "shared": prefill.shared}
    if restored := sum(places.values()):
        notes.append(Event("kv.restored", {"tokens": restored, **places}))
    if prefill.recomputed:
        notes.append(Event("kv.recomputed", {"tokens": prefill.recomputed}))
    return notes


async def _complete(s: Services, owner: Owner, attempt: Attempt, behind: Past, end: _End, reading: Reading) -> Standing:
    whole = end.whole
    closing = s.chat.assistant_close(ended=bool(whole) and whole[-1] in s.engine.card.eos_token_ids)
    after = [*behind.tokens, *s.chat.assistant_open(), *whole, *closing]
    if end.kv_keys is None:
        state = await (await s.engine.client()).kv_state(owner.session_id)
        end.kv_tokens, end.kv_keys = state.tokens, state.keys
    output = {
        "outcome": reading.outcome,
        "text": reading.text,
        "calls": list(reading.calls),
        **({"complaint": reading.complaint} if reading.complaint else {}),
        **({"repaired": True} if reading.repaired else {}),
        "sampled": len(whole),
        "kv_tokens": end.kv_tokens,
        **end.finish,
    }
    told = "corrected" if reading.complaint else reading.outcome
    checkpoint = checkpoints.after_think(s.engine.card, after, behind.base, end.kv_keys)
    ended = await steps.complete(
        s.db,
        owner,
        attempt,
        segments=[Segment("scaffold", closing)],
        output=output,
        checkpoint=checkpoint,
        notes=[
            Event("message.completed", {"text": reading.text, "outcome": told}),
            *([Event("session.interrupted")] if reading.outcome == "interrupted" else []),
            *warning(s.engine.card.context_length, len(behind.tokens), len(after)),
        ],
        to=None if reading.outcome == "tools" else Move.REST,
        last=_last(s, end),
    )
    if ended.mine:
        s.recent.keep(
            owner.session_id, owner.epoch, attempt.step_no, behind.after(checkpoint, after, end.kv_tokens, output)
        )
    return ended.standing
