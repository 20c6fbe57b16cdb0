"""One think: sampled tokens made durable as they come, resumed after the last durable one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
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
from runtime.steps.services import Services
from runtime.store import budgets, events, fleet, steps
from runtime.store.values import Attempt, Event, Owner, Segment
from runtime.tools.catalog import Catalog
from workflows.contract import StepIn, ThinkIn
from workflows.states import Event as Move

FLUSH_EVERY_S = 0.04
CHOICES = ("auto", "none", "required")  # anything else is a tool's name


async def think(s: Services, what: ThinkIn, execution: str) -> None:
    owner = s.owner(what.session_id, what.epoch)
    opening = Segment("scaffold", s.chat.assistant_open())
    attempt = await steps.begin(s.db, owner, what.step_no, "think", Move.THINK, token=execution, opening=opening)
    if attempt.done is not None or attempt.held:
        return
    config = SessionConfig.model_validate(attempt.session.config)
    before = await steps.transcript(s.db, what.session_id, what.step_no)
    prompt = [*before, *opening.token_ids]
    sampled = attempt.model_tokens
    finish: dict[str, Any] = {"finish_reason": "stop", "resumed": True}
    within = budgets.left(attempt.session, "tokens")
    try:
        if not _ended(s, sampled, config):
            finish = await _generate(s, owner, attempt, config, what.tool_choice, prompt, sampled, within)
    except asyncio.CancelledError:
        await asyncio.shield(steps.abandon(s.db, owner, attempt, "cancelled", "the think was cancelled"))
        raise
    if not _ended(s, sampled, config) and within is not None and await steps.hold_for_budget(s.db, owner, attempt):
        return  # it goes on after its last durable token, once there is more
    tools, _ = await catalog(s, what.session_id, config)
    reading = _read(s, tools, sampled, what)
    await _complete(s, owner, attempt, before, sampled, finish, reading)


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
    before = await steps.transcript(s.db, what.session_id, what.step_no)
    finish = {"finish_reason": "interrupted", "resumed": True}
    reading = Reading("interrupted", s.chat.parse_assistant(attempt.model_tokens).text)
    await _complete(s, owner, attempt, before, attempt.model_tokens, finish, reading)
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
    tool_choice: str,
    prompt: list[int],
    sampled: list[int],
    within: float | None,
) -> dict[str, Any]:
    """Run the engine from the last durable token; `sampled` grows as tokens become durable. `within`: tokens that the
    budget still allows."""
    room = s.engine.card.context_length - len(prompt) - len(sampled)
    if room <= 0:
        raise InvalidRequest(
            f"the context is full: {len(prompt)} tokens of {s.engine.card.context_length}; start a new session",
            code="context_length_exceeded",
        )
    tools, _ = await catalog(s, owner.session_id, config)
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
        known_tokens=await _known_tokens(s, owner.session_id, len(prompt), len(sampled)),
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
    assert received.done is not None
    return {**dataclasses.asdict(received.done), "kv": received.source()}


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
    """Append what arrives, at most once per FLUSH_EVERY_S, until there is no more."""
    decoder = StreamDecoder(s.tokenizer)
    decoder.push(sampled)  # what was durable before has been shown
    told = False
    while received.waiting or not receiving.done():
        await received.changed.wait()
        received.changed.clear()
        if not told and received.prefill is not None:
            told = True
            await fleet.note_residency(s.db, owner.session_id, attempt.session.tenant_id, "device", received.source())
        await _tell(s, owner, attempt, received)
        while received.waiting:
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


async def _known_tokens(s: Services, session_id: str, prompt: int, sampled: int) -> int:
    """How many tokens of the prompt had their KV once: as many as the engine held after the last think, or, if this
    one is resumed, all but the last of those sampled."""
    if sampled:
        return prompt + sampled - 1
    row = await s.db.fetchrow(
        "SELECT CASE WHEN kind = 'think' THEN (output ->> 'kv_tokens')::int ELSE token_start END AS tokens FROM steps"
        " WHERE session_id = $1 AND kind IN ('think', 'compaction') AND state = 'completed' AND live"
        " ORDER BY step_no DESC LIMIT 1",
        session_id,
    )
    return min(int(row["tokens"]), prompt) if row else 0


async def _complete(
    s: Services,
    owner: Owner,
    attempt: Attempt,
    before: list[int],
    sampled: list[int],
    finish: dict[str, Any],
    reading: Reading,
) -> None:
    closing = s.chat.assistant_close(ended=bool(sampled) and sampled[-1] in s.engine.card.eos_token_ids)
    after = [*before, *s.chat.assistant_open(), *sampled, *closing]
    state = await (await s.engine.client()).kv_state(owner.session_id)
    output = {
        "outcome": reading.outcome,
        "text": reading.text,
        "calls": list(reading.calls),
        **({"complaint": reading.complaint} if reading.complaint else {}),
        **({"repaired": True} if reading.repaired else {}),
        "sampled": len(sampled),
        "kv_tokens": state.tokens,
        **finish,
    }
    told = "corrected" if reading.complaint else reading.outcome
    await steps.complete(
        s.db,
        owner,
        attempt,
        segments=[Segment("scaffold", closing)],
        output=output,
        checkpoint=await checkpoints.make(
            s, owner.session_id, after, await checkpoints.workspace_root(s, owner.session_id), state.keys
        ),
        notes=[
            Event("message.completed", {"text": reading.text, "outcome": told}),
            *([Event("session.interrupted")] if reading.outcome == "interrupted" else []),
            *warning(s.engine.card.context_length, len(before), len(after)),
        ],
        to=None if reading.outcome == "tools" else Move.REST,
    )
