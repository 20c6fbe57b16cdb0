"""Steps, attempts, the transcript and checkpoints: every write fenced by the epoch, every one safe to repeat."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import asyncpg

from runtime.errors import StaleEpoch
from runtime.store import budgets, children, events, questions, standing, whole
from runtime.store.database import Database
from runtime.store.held import locked
from runtime.store.questions import Asked
from runtime.store.sessions import after_move, move, void_questions
from runtime.store.standing import Standing
from runtime.store.values import Attempt, Checkpoint, Event, Owner, Sampled, Segment, Session
from workflows.states import Event as Move
from workflows.states import IllegalTransition, State, moves

# A message is taken, and room is made for it, whatever is left of the budget: a turn that has begun can be ended.
_ASKING = frozenset({"think", "tool"})
_BUSY = (State.PROVISIONING, State.IDLE, State.THINKING, State.TOOL_RUNNING)


class Ended(NamedTuple):
    """`mine`: this call ended the step, not one before it."""

    standing: Standing
    mine: bool


async def begin(
    db: Database,
    owner: Owner,
    step_no: int,
    kind: str,
    to: Move | None,
    *,
    token: str,
    message_id: str | None = None,
    opening: Segment | None = None,
    stopping: bool = False,
    keeps: Callable[[Sequence[int]], bool] | None = None,
) -> Attempt:
    """Open an attempt of a step, creating the step if it is new.

    `token` names this execution, so that a repeated call opens no second attempt; `opening` is the first segment of
    a new step. If the step has completed, its output is in `done` and nothing is written; nor is anything where the
    session is paused or waits (`held`), which it does from now on if its budget is used up; `stopping` is for an
    attempt that only ends the step, and may do so there. `keeps`: whether a new attempt goes on from these sampled
    tokens, or begins anew without them. Raises StaleEpoch, IllegalTransition.
    """
    about: dict[str, Any] = {"kind": kind, "node": owner.node_id, "epoch": owner.epoch}
    if message_id is not None:
        about["message_id"] = message_id

    new = functools.partial(
        whole.begin,
        owner=owner,
        step_no=step_no,
        kind=kind,
        token=token,
        message_id=message_id,
        opening=opening,
        started=Event("step.started", about),
    )

    def begun(session: Session, start: int) -> Attempt:
        return Attempt(session, step_no, 1, start, (opening,) if opening else (), None)

    async def work(connection: asyncpg.Connection) -> Attempt:
        session = await locked(connection, owner.session_id, owner.epoch)
        if (state := _state_of_new(session, kind, to)) is not None:
            found = await new(connection, state=state, states=None)
            if found is not None:
                if kind == "input":  # a step that failed is left behind now
                    await children.end_left_behind(connection, owner.session_id)
                return begun(*found)
        return await usual(connection, session)

    async def usual(connection: asyncpg.Connection, session: Session) -> Attempt:
        step = await connection.fetchrow(
            "SELECT * FROM steps WHERE session_id = $1 AND step_no = $2", owner.session_id, step_no
        )
        if step is not None and step["state"] == "completed":
            return Attempt(session, step_no, step["attempts"], step["token_start"], (), step["output"])
        if step is not None and (step["state"], step["kind"]) != ("running", kind):
            raise StaleEpoch(f"step {step_no} is a {step['kind']} that is {step['state']}: the record went on")
        if not stopping and (
            session.state in (State.PAUSED, State.WAITING)
            or (kind in _ASKING and await _budget_is_spent(connection, session, step_no, to))
        ):
            return Attempt(session, step_no, 0, 0, (), None, held=True)
        is_new = step is None
        if step is None:
            step = await _insert(connection, owner, session.tenant_id, step_no, kind, message_id)
            if kind == "input":  # a step that failed is left behind now
                await children.end_left_behind(connection, owner.session_id)
        durable = () if is_new else await _segments_of(connection, owner.session_id, step_no)
        if opening is not None and not durable:
            await _add_segments(connection, owner.session_id, session.tenant_id, step_no, [opening])
            durable = (opening,)
        at = (connection, owner, session.tenant_id, step, token)
        found = _sampled(durable)
        attempt_no, fresh, durable = await _open_attempt(*at, durable, keeps)
        if to is not None:
            await move(connection, session, to)
        if fresh:
            kept = _sampled(durable)
            gone = {"dropped": found - kept} if found > kept else {}
            retried = Event("step.retrying", {**about, "keep": kept, **gone})
            event = Event("step.started", about) if attempt_no == 1 else retried
            await events.append(connection, owner.session_id, [event], step_no=step_no, attempt_no=attempt_no)
        return Attempt(session, step_no, attempt_no, step["token_start"], durable, None)

    if to is not None and not stopping:
        target, states = _ways(to)
        found = await new(db, state=target, states=states)
        if found is not None:
            return begun(*found)
    return await db.run(work)


@functools.cache
def _ways(to: Move) -> tuple[State, Sequence[State]]:
    """Where a move leads, and from where a session that nothing holds up may make it. All of a step's moves lead to one
    state, wherever they begin."""
    leads = {Move.THINK: State.THINKING, Move.RUN_TOOL: State.TOOL_RUNNING, Move.REST: State.IDLE}[to]
    return leads, tuple(state for state in _BUSY if state == leads or (state, leads) in moves())


def _state_of_new(session: Session, kind: str, to: Move | None) -> State | None:
    """The state in which a new step runs; None where it is not to run, or more must be known first."""
    if to is None or session.state in (State.PAUSED, State.WAITING):
        return None
    if kind in _ASKING and budgets.exhausted(session) is not None:
        return None
    with contextlib.suppress(IllegalTransition):
        return after_move(session, to)
    return None


async def _budget_is_spent(connection: asyncpg.Connection, session: Session, step_no: int, to: Move | None) -> bool:
    """Ask for more at the wall; the step begins when it is given."""
    spent = budgets.exhausted(session)
    if spent is None or to is None:
        return False
    await move(connection, session, to)
    await ask_for_budget(connection, session, step_no, spent)
    return True


async def ask_for_budget(
    connection: asyncpg.Connection, session: Session, step_no: int, spent: Mapping[str, Any]
) -> None:
    asked_before = await connection.fetchval(
        "SELECT count(*) FROM questions WHERE session_id = $1 AND step_no = $2 AND kind = 'budget' AND state <> 'open'",
        session.session_id,
        step_no,
    )
    await questions.ask(connection, session, step_no, Asked("budget", -1 - asked_before, spent))
    await questions.hold(connection, session, "budget")


async def hold(
    db: Database,
    owner: Owner,
    attempt: Attempt,
    asked: Sequence[Asked],
    *,
    unknown: Sequence[int] = (),
) -> list[questions.Answer]:
    """Ask what the step must know; where something is open, its attempt ends and the session waits.

    `unknown`: calls that may or may not have taken effect, and must not run again by themselves. Returns an answer for
    each question, which says whether it is open.
    """

    async def work(connection: asyncpg.Connection) -> list[questions.Answer]:
        session = await locked(connection, owner.session_id, owner.epoch)
        for call_no in unknown:
            await connection.execute(
                "UPDATE tool_calls SET status = 'outcome_unknown' WHERE session_id = $1 AND step_no = $2"
                " AND call_no = $3 AND status = 'pending'",
                owner.session_id,
                attempt.step_no,
                call_no,
            )
        answers = [await questions.ask(connection, session, attempt.step_no, one) for one in asked]
        waits = [one.kind for one, answer in zip(asked, answers, strict=True) if answer.state == "open"]
        if waits:
            await close_attempt(connection, attempt, "waiting", None)
            await questions.hold(connection, session, waits[0])
        return answers

    return await db.run(work)


async def hold_for_budget(db: Database, owner: Owner, attempt: Attempt) -> bool:
    """A step that used up the budget in its middle waits there. False: there is some left."""

    async def work(connection: asyncpg.Connection) -> bool:
        session = await locked(connection, owner.session_id, owner.epoch)
        spent = budgets.exhausted(session)
        if spent is None:
            return False
        await close_attempt(connection, attempt, "waiting", None)
        await ask_for_budget(connection, session, attempt.step_no, spent)
        return True

    return await db.run(work)


async def append_tokens(
    db: Database,
    owner: Owner,
    attempt: Attempt,
    offset: int,
    token_ids: Sequence[int],
    text: str,
    logprobs: Sequence[Mapping[str, Any]] | None = None,
    calls: Sequence[Mapping[str, Any]] = (),
    spent: int | None = None,
) -> None:
    """Make sampled tokens durable, with the event that shows them. `offset`: sampled tokens of the step before these;
    `spent`: what they count in the budget, where that is another number than theirs.

    Already there: a no-op. Not the next ones: StaleEpoch, since another attempt is writing.
    """
    delta = Sampled(offset, token_ids, text, logprobs, calls).event

    async def work(connection: asyncpg.Connection) -> int:
        session = await locked(connection, owner.session_id, owner.epoch)
        held = await whole.append(connection, session, attempt, offset, token_ids, delta, spent)
        assert held is not None
        return held

    durable = None
    if not budgets.limits(attempt.session):
        durable = await whole.append(db, attempt.session, attempt, offset, token_ids, delta, spent)
    if durable is None:
        durable = await db.run(work)
    if durable != offset and durable < offset + len(token_ids):
        raise StaleEpoch(f"step {attempt.step_no} has {durable} durable tokens, not {offset}")


async def complete(
    db: Database,
    owner: Owner,
    attempt: Attempt,
    *,
    segments: Sequence[Segment],
    output: dict[str, Any],
    checkpoint: Checkpoint,
    notes: Sequence[Event] = (),
    to: Move | None = None,
    token_start: int | None = None,
    sampled: int = 0,
    last: Sampled | None = None,
    spent: int | None = None,
) -> Ended:
    """End a step: its last segments, its checkpoint and its events in one transaction. Repeated: a no-op.

    `token_start`: from where on a compaction replaces the transcript; `sampled`: tokens that the budget does not know
    of yet; `last`: sampled tokens that become durable with the end; `spent`: what all of these count in the budget,
    where that is another number. Raises StaleEpoch, also where the step has other
    tokens than those before them, since another attempt is writing.
    """
    model = [Segment("model", last.token_ids)] if last and last.token_ids else []
    completed = Event("step.completed", {k: v for k, v in output.items() if k != "text"})
    told = [*([last.event] if last else []), *notes, completed, _made(checkpoint)]
    end = functools.partial(
        whole.complete,
        attempt=attempt,
        segments=[*model, *segments],
        output=output,
        checkpoint=checkpoint,
        start=attempt.token_start if token_start is None else token_start,
        durable=last.offset if last else None,
        tokens=sampled + (len(last.token_ids) if last else 0) if spent is None else spent,
        voids=to is Move.REST,
    )
    idle = [Event("session.idle")] if to is Move.REST else []

    async def work(connection: asyncpg.Connection) -> Ended:
        session = await locked(connection, owner.session_id, owner.epoch)
        moves_on = to is not None and session.state not in (State.CANCELLING, State.PAUSED)
        state = after_move(session, to) if moves_on and to is not None else None
        wrote = await end(connection, session, state=state, states=None, told=[*told, *(idle if moves_on else [])])
        if wrote is None:
            await _ensure_completed(connection, attempt)
        return Ended(await standing.standing(connection, owner.session_id), wrote is not None)

    if not budgets.limits(attempt.session):
        target, states = (None, _BUSY) if to is None else _ways(to)
        found = await end(db, attempt.session, state=target, states=states, told=[*told, *idle])
        if found is not None:
            return Ended(found, True)
    return await db.run(work)


def _made(checkpoint: Checkpoint) -> Event:
    pages = len(checkpoint.kv_new)
    about = {"tokens": checkpoint.token_count, "workspace": checkpoint.workspace_root, "pages": pages}
    return Event("checkpoint.created", about)


async def _ensure_completed(connection: asyncpg.Connection, attempt: Attempt) -> None:
    """A step that failed, or was left behind, is not completed by whoever comes late. Raises StaleEpoch."""
    key = (attempt.session.session_id, attempt.step_no)
    state = await connection.fetchval("SELECT state FROM steps WHERE session_id = $1 AND step_no = $2", *key)
    if state == "running":
        raise StaleEpoch(f"step {attempt.step_no} has other durable tokens than this attempt wrote")
    if state != "completed":
        raise StaleEpoch(f"step {attempt.step_no} is {state}: it was ended meanwhile")


async def rest(connection: asyncpg.Connection, session: Session, notes: Sequence[Event], *, step_no: int) -> None:
    """The turn is over; a paused session stays paused, at rest. The session's row is locked."""
    await void_questions(connection, session.session_id)
    rests = session.state not in (State.CANCELLING, State.PAUSED)
    if rests:
        await move(connection, session, Move.REST)
    idle = [Event("session.idle")] if rests else []
    await events.append(connection, session.session_id, [*notes, *idle], step_no=step_no)


async def abandon(db: Database, owner: Owner, attempt: Attempt, outcome: str, message: str) -> None:
    """Note how an attempt ended without completing the step (lost, failed, cancelled). Never raises StaleEpoch."""

    async def work(connection: asyncpg.Connection) -> None:
        await close_attempt(connection, attempt, outcome, {"message": message})

    await db.run(work, patience_s=5)


async def transcript(db: Database, session_id: str, before_step: int) -> list[int]:
    """Token ids of the branch that the session is on, completed steps before `before_step` only."""
    rows = await branch(db, session_id, before_step)
    return [token for _, _, token_ids in rows for token in token_ids]


async def branch(db: Database, session_id: str, before_step: int | None = None) -> list[tuple[int, str, list[int]]]:
    """The segments of the transcript: (step_no, kind, token ids). A compaction replaces what lies behind its start."""
    rows = await db.fetch(
        "SELECT s.step_no, s.kind AS step_kind, s.token_start, g.kind, g.token_ids"
        " FROM segments g JOIN steps s USING (session_id, step_no) WHERE session_id = $1 AND s.live"
        " AND s.state = 'completed' AND ($2::int IS NULL OR step_no < $2) ORDER BY step_no, idx",
        session_id,
        before_step,
    )
    found: list[tuple[int, str, list[int]]] = []
    cut = 0  # the last step whose compaction has been applied
    for row in rows:
        if row["step_kind"] == "compaction" and row["step_no"] != cut:
            cut = row["step_no"]
            found = _first(found, row["token_start"])
        found.append((row["step_no"], row["kind"], row["token_ids"]))
    return found


async def counted_last(db: Database, session_id: str) -> tuple[int, int] | None:
    """The transcript's length at the end of the last think that a model server counted, and its count of all of it."""
    row = await db.fetchrow(
        "SELECT c.token_count, (s.output -> 'usage' ->> 'prompt_tokens')::bigint"
        " + (s.output -> 'usage' ->> 'completion_tokens')::bigint AS tokens FROM steps s"
        " JOIN checkpoints c USING (session_id, step_no) WHERE session_id = $1 AND s.live AND s.kind = 'think'"
        " AND s.state = 'completed' AND s.output -> 'usage' ? 'prompt_tokens' AND NOT s.output -> 'usage' ? 'estimated'"
        " ORDER BY step_no DESC LIMIT 1",
        session_id,
    )
    return None if row is None else (row["token_count"], row["tokens"])


def _first(segments: list[tuple[int, str, list[int]]], tokens: int) -> list[tuple[int, str, list[int]]]:
    """The segments that make up the first so many tokens; the last one may be cut."""
    kept = []
    for step_no, kind, token_ids in segments:
        if tokens <= 0:
            break
        kept.append((step_no, kind, token_ids[:tokens]))
        tokens -= len(token_ids)
    return kept


async def _insert(
    connection: asyncpg.Connection,
    owner: Owner,
    tenant_id: str,
    step_no: int,
    kind: str,
    message_id: str | None,
) -> asyncpg.Record:
    return await connection.fetchrow(
        "INSERT INTO steps (session_id, step_no, tenant_id, parent_no, kind, state, token_start, message_id)"
        " SELECT $1, $2, $3, parent.step_no, $4, 'running', coalesce(parent.ends, 0), $5 FROM (VALUES (1)) AS one"
        " LEFT JOIN (SELECT step_no, token_start + token_count AS ends FROM steps WHERE session_id = $1 AND live"
        " AND state = 'completed' AND step_no < $2 ORDER BY step_no DESC LIMIT 1) AS parent ON true RETURNING *",
        owner.session_id,
        step_no,
        tenant_id,
        kind,
        message_id,
    )


async def _open_attempt(
    connection: asyncpg.Connection,
    owner: Owner,
    tenant_id: str,
    step: asyncpg.Record,
    token: str,
    durable: tuple[Segment, ...],
    keeps: Callable[[Sequence[int]], bool] | None,
) -> tuple[int, bool, tuple[Segment, ...]]:
    """The attempt's number, whether it is new, and what it goes on from."""
    key = (owner.session_id, step["step_no"])
    if step["attempts"]:
        known = await connection.fetchval(
            "SELECT attempt_no FROM attempts WHERE session_id = $1 AND step_no = $2 AND token = $3", *key, token
        )
        if known is not None:
            return known, False, durable
        await connection.execute(
            "UPDATE attempts SET outcome = 'lost', ended_at = now()"
            " WHERE session_id = $1 AND step_no = $2 AND outcome = 'running'",
            *key,
        )
    sampled = [token for segment in durable if segment.kind == "model" for token in segment.token_ids]
    if sampled and keeps is not None and not keeps(sampled):
        await connection.execute("DELETE FROM segments WHERE session_id = $1 AND step_no = $2 AND kind = 'model'", *key)
        durable, sampled = tuple(segment for segment in durable if segment.kind != "model"), []
    attempt_no = await connection.fetchval(
        "UPDATE steps SET attempts = attempts + 1 WHERE session_id = $1 AND step_no = $2 RETURNING attempts",
        *key,
    )
    await connection.execute(
        "INSERT INTO attempts (session_id, step_no, attempt_no, tenant_id, token, epoch, node_id, node_boot,"
        " resumed_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        *key,
        attempt_no,
        tenant_id,
        token,
        owner.epoch,
        owner.node_id,
        owner.node_boot,
        len(sampled),
    )
    return attempt_no, True, durable


async def close_attempt(
    connection: asyncpg.Connection, attempt: Attempt, outcome: str, error: dict[str, Any] | None
) -> None:
    await connection.execute(
        "UPDATE attempts SET outcome = $4, error = $5, ended_at = now()"
        " WHERE session_id = $1 AND step_no = $2 AND attempt_no = $3 AND outcome = 'running'",
        attempt.session.session_id,
        attempt.step_no,
        attempt.attempt_no,
        outcome,
        error,
    )


def _sampled(durable: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in durable if segment.kind == "model")


async def _segments_of(connection: asyncpg.Connection, session_id: str, step_no: int) -> tuple[Segment, ...]:
    rows = await connection.fetch(
        "SELECT kind, token_ids FROM segments WHERE session_id = $1 AND step_no = $2 ORDER BY idx",
        session_id,
        step_no,
    )
    return tuple(Segment(row["kind"], tuple(row["token_ids"])) for row in rows)


async def _add_segments(
    connection: asyncpg.Connection, session_id: str, tenant_id: str, step_no: int, segments: Sequence[Segment]
) -> None:
    for segment in segments:
        if segment.token_ids:
            await connection.execute(
                "INSERT INTO segments (session_id, step_no, idx, tenant_id, kind, token_ids) SELECT $1, $2,"
                " coalesce(max(idx) + 1, 0), $3, $4, $5 FROM segments WHERE session_id = $1 AND step_no = $2",
                session_id,
                step_no,
                tenant_id,
                segment.kind,
                list(segment.token_ids),
            )
