"""One think: sampled tokens made durable as they come, resumed after the last durable one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from engine.tokens import StopText, may_go_on
from runtime.config import SessionConfig
from runtime.steps import checkpoints
from runtime.steps.compacting import warning
from runtime.steps.generating import Ask, End, Generation, Shown, told_logprobs
from runtime.steps.listing import catalog, catalog_of
from runtime.steps.measuring import Measure, measure, spent
from runtime.steps.reading import Reading, read
from runtime.steps.recent import Past, past
from runtime.steps.recent import read as read_past
from runtime.steps.services import Services
from runtime.steps.unsealing import Opened, opened
from runtime.store import budgets, steps
from runtime.store.standing import Standing
from runtime.store.values import Attempt, Event, Owner, Sampled, Segment, Session
from runtime.tools.catalog import Catalog
from runtime.tools.redacting import NOTHING, Redactor
from workflows.contract import StepIn, ThinkIn
from workflows.states import Event as Move


async def think(s: Services, what: ThinkIn, execution: str) -> Standing | None:
    """Where the session stands after it; None where that is for the record to say."""
    owner = s.owner(what.session_id, what.epoch)
    opening = Segment("scaffold", s.chat.assistant_open())
    kept = s.recent.find(what)
    measured = await measure(s, what.session_id)
    ahead = _ahead(s, what, kept, opening, measured) if kept else None
    try:
        keeps = _keeps(s) if s.engine.card.external else None
        begin = steps.begin(
            s.db, owner, what.step_no, "think", Move.THINK, token=execution, opening=opening, keeps=keeps
        )
        attempt, behind = (await begin, kept) if kept else await asyncio.gather(begin, read_past(s.db, what))
        if attempt.done is not None or attempt.held:
            return None
        if ahead is not None and attempt.attempt_no > 1:
            await ahead.stop()
            ahead = None
        return await _think(s, owner, attempt, behind, opening, what, measured, ahead)
    finally:
        if ahead is not None:
            await ahead.stop()


def _keeps(s: Services) -> Callable[[Sequence[int]], bool]:
    """Whether what a model server said is kept by the next attempt: a whole message is, and of one that was cut off, a
    text that the server goes on with. Otherwise it says all of it again."""
    card = s.engine.card

    def keeps(sampled: Sequence[int]) -> bool:
        return sampled[-1] in card.eos_token_ids or (card.continues and may_go_on(sampled))

    return keeps


def _ahead(s: Services, what: ThinkIn, behind: Past, opening: Segment, measured: Measure) -> Generation | None:
    """The engine at work for the think's first attempt, where all that it must be told is known from the step before;
    the record of the beginning is written meanwhile."""
    if behind.session is None or budgets.limits(behind.session):
        return None
    config = _config(behind.session, behind)
    if config.servers or any(tool.secrets for tool in config.declared):
        return None
    ask = _ask(behind.session, what, 1, config, catalog_of(s, config), behind, opening, [], measured, NOTHING)
    return Generation(s, ask) if ask.fits else None


def _ask(
    session: Session,
    what: ThinkIn,
    attempt_no: int,
    config: SessionConfig,
    tools: Catalog,
    behind: Past,
    opening: Segment,
    sampled: list[int],
    measured: Measure,
    redactor: Redactor,
) -> Ask:
    prompt, seed = [*behind.tokens, *opening.token_ids], behind.turn.get("seed")
    about = (session, what.step_no, attempt_no, config, tools, what.tool_choice)
    return Ask(*about, prompt, sampled, behind.known, measured, redactor, seed)


async def _think(
    s: Services,
    owner: Owner,
    attempt: Attempt,
    behind: Past,
    opening: Segment,
    what: ThinkIn,
    measured: Measure,
    ahead: Generation | None,
) -> Standing | None:
    config = _config(attempt.session, behind)
    tools, _ = await catalog(s, what.session_id, config)
    values = await opened(s, attempt.session.tenant_id, config)
    generation = ahead
    try:
        end = End(list(attempt.model_tokens))
        if not _ended(s, end.sampled, config):
            at, hide = (attempt.session, what, attempt.attempt_no), values.redactor
            ask = _ask(*at, config, tools, behind, opening, end.sampled, measured, hide)
            generation = generation or Generation(s, ask)
            end = await generation.take(owner, attempt)
        if measured.exact and not _ended(s, end.whole, config) and budgets.left(attempt.session, "tokens") is not None:
            await _keep(s, owner, attempt, end, values, config)
            if await steps.hold_for_budget(s.db, owner, attempt):
                return None  # it goes on after its last durable token, once there is more
        return await _complete(s, owner, attempt, behind, end, _read(s, tools, end.whole, what, config), values)
    except asyncio.CancelledError:
        await asyncio.shield(steps.abandon(s.db, owner, attempt, "cancelled", "the think was cancelled"))
        raise
    finally:
        if generation is not None:
            await generation.stop()


def _config(session: Session, behind: Past) -> SessionConfig:
    """The session's, with what its message says for the turn."""
    return SessionConfig.model_validate(session.config).for_turn(behind.turn)


async def _keep(s: Services, owner: Owner, attempt: Attempt, end: End, values: Opened, config: SessionConfig) -> None:
    """Make the rest durable by itself."""
    if (last := _last(s, end, values, config, False)) is not None:
        told = (last.offset, last.token_ids, last.text, last.logprobs, last.calls)
        await steps.append_tokens(s.db, owner, attempt, *told)
        end.sampled, end.rest, end.logprobs = end.whole, [], []


def _last(s: Services, end: End, values: Opened, config: SessionConfig, is_whole: bool) -> Sampled | None:
    shown = Shown(s.chat, values.redactor, end.sampled, config.sampling.stop, calls=bool(config.tools))
    told = shown.push(end.rest, last=is_whole)
    if not end.rest and not told.text:
        return None
    return Sampled(len(end.sampled), end.rest, told.text, told_logprobs(end.logprobs), told.calls)


def _read(s: Services, tools: Catalog, sampled: list[int], what: ThinkIn, config: SessionConfig) -> Reading:
    callable_now = () if what.tool_choice == "none" else tools.names
    parsed = s.chat.parse_assistant(sampled, config.sampling.stop, callable_now)
    ended = bool(sampled) and sampled[-1] in s.engine.card.eos_token_ids
    if config.response_format is not None and config.response_format.type != "text" and not parsed.calls:
        return Reading("final" if parsed.complete else "incomplete", parsed.text)
    return read(parsed, ended, tools.names, what.tool_choice, what.corrections)


async def interrupt_think(s: Services, owner: Owner, what: StepIn, execution: str) -> bool:
    """End the think that runs with what is durable of it. False: that is nothing."""
    attempt = await steps.begin(s.db, owner, what.step_no, "think", None, token=execution, stopping=True)
    if attempt.done is not None:
        return True
    if not attempt.model_tokens:
        return False
    behind = await past(s.db, s.recent, what)
    end = End(attempt.model_tokens, finish={"finish_reason": "interrupted", "resumed": True})
    config = _config(attempt.session, behind)
    reading = Reading("interrupted", s.chat.parse_assistant(end.sampled, config.sampling.stop).text)
    values = await opened(s, attempt.session.tenant_id, config)
    await _complete(s, owner, attempt, behind, end, reading, values)
    return True


def _ended(s: Services, sampled: list[int], config: SessionConfig) -> bool:
    return bool(sampled) and (
        sampled[-1] in s.engine.card.eos_token_ids
        or (len(sampled) >= config.limits.max_think_tokens and not s.engine.card.external)
        or (bool(config.sampling.stop) and StopText.ends(s.tokenizer, config.sampling.stop, sampled))
    )


def _counted(s: Services, end: End) -> int:
    """Tokens of the message: the server's own, where it counted them, and about as many of what it said before."""
    before = end.sampled[: len(end.sampled) - end.appended]
    if "usage" not in end.finish:
        return spent(s.engine.card, len(end.whole))
    return int(end.finish["usage"]["completion_tokens"]) + spent(s.engine.card, len(before))


def _left_to_count(s: Services, end: End) -> int | None:
    """What the budget has not counted yet, or counted too much, of what a model server generated."""
    if not s.engine.card.external:
        return None
    if "usage" not in end.finish:
        return spent(s.engine.card, len(end.rest))
    return int(end.finish["usage"]["completion_tokens"]) - end.spent


async def _complete(
    s: Services, owner: Owner, attempt: Attempt, behind: Past, end: End, reading: Reading, values: Opened
) -> Standing:
    whole = end.whole
    closing = s.chat.assistant_close(ended=bool(whole) and whole[-1] in s.engine.card.eos_token_ids)
    after = [*behind.tokens, *s.chat.assistant_open(), *whole, *closing]
    if end.kv_keys is None:
        state = await (await s.engine.client()).kv_state(owner.session_id)
        end.kv_tokens, end.kv_keys = state.tokens, state.keys
    hide = values.redactor.text
    output = {
        "outcome": reading.outcome,
        "text": hide(reading.text),
        "calls": values.hide(reading.calls),
        **({"complaint": hide(reading.complaint)} if reading.complaint else {}),
        **({"repaired": True} if reading.repaired else {}),
        "sampled": _counted(s, end),
        "kv_tokens": end.kv_tokens,
        **({"exact": False} if s.engine.card.external else {}),
        **end.finish,
    }
    measured = await measure(s, owner.session_id)
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
            Event("message.completed", {"text": output["text"], "outcome": told}),
            *([Event("session.interrupted")] if reading.outcome == "interrupted" else []),
            *warning(measured, len(behind.tokens), len(after)),
        ],
        to=None if reading.outcome == "tools" else Move.REST,
        last=_last(s, end, values, _config(attempt.session, behind), True),
        spent=_left_to_count(s, end),
    )
    if ended.mine:
        s.recent.keep(
            owner.session_id,
            owner.epoch,
            attempt.step_no,
            behind.after(attempt.session, checkpoint, after, end.kv_tokens, output),
        )
    return ended.standing
