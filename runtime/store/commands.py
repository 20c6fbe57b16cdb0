"""What is asked of a session beside messages: pause, resume, retry, rewind, interrupt, changes of its workspace.

`accept` refuses at once, in a sentence, what the present state does not allow. An accepted command is applied by the
session's workflow at a boundary (`apply`), where nothing of the session runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from runtime.errors import Conflict, InvalidRequest, NotFound
from runtime.store import alterations, branches, budgets, events, questions
from runtime.store.database import Database
from runtime.store.held import locked_at_any_epoch
from runtime.store.sessions import set_state
from runtime.store.standing import way_back
from runtime.store.values import Event, Session
from workflows.states import TERMINAL, IllegalTransition, State
from workflows.states import Event as Move

_WORKING = frozenset({State.PROVISIONING, State.THINKING, State.TOOL_RUNNING})
# In which states a command makes sense, and what to do instead elsewhere.
_ALLOWED: Mapping[str, tuple[frozenset[State], str]] = {
    "pause": (_WORKING | {State.IDLE, State.WAITING, State.PAUSED}, "only a session that works or rests can be paused"),
    "resume": (frozenset({State.PAUSED}), "only a paused session can be resumed"),
    "retry": (frozenset({State.FAILED}), "only a failed session can be retried; send a message to go on"),
    "rewind": (
        _WORKING | {State.IDLE, State.WAITING, State.PAUSED, State.FAILED},
        "a session can be rewound once it has a checkpoint, and until it ends",
    ),
    "interrupt": (
        _WORKING | {State.IDLE, State.WAITING, State.PAUSED, State.FAILED},
        "there is nothing to interrupt",
    ),
    **{
        verb: (
            frozenset({State.CREATED, State.IDLE, State.WAITING, State.PAUSED, State.FAILED}),
            "its workspace is changed from outside only while it rests; wait, or interrupt or pause it",
        )
        for verb in alterations.VERBS
    },
}


@dataclass(frozen=True)
class Applied:
    """What the workflow must know. `moved`: the session is at another checkpoint; `interrupt`: end what runs next;
    `alters`: a change of the workspace is next, which the session's node makes."""

    moved: bool = False
    interrupt: bool = False
    alters: bool = False

    @property
    def led_to(self) -> str | None:
        return "moved" if self.moved else "interrupt" if self.interrupt else None


async def accept(
    db: Database,
    tenant_id: str,
    session_id: str,
    command_id: str,
    verb: str,
    argument: Mapping[str, Any],
    body: bytes | None = None,
) -> None:
    """From here on the command is never lost. Repeated with the same id: a no-op. Raises NotFound, Conflict,
    InvalidRequest."""

    async def work(connection: asyncpg.Connection) -> None:
        row = await connection.fetchrow(
            "SELECT state, ending FROM sessions WHERE session_id = $1 AND tenant_id = $2 FOR UPDATE",
            session_id,
            tenant_id,
        )
        if row is None:
            raise NotFound(f"there is no session {session_id}")
        if await connection.fetchval("SELECT true FROM commands WHERE command_id = $1", command_id):
            return
        await _ensure_allowed(connection, session_id, verb, State(row["state"]), row["ending"])
        if verb == "rewind":
            await branches.ensure_checkpoint(connection, session_id, argument["step"])
        if verb in alterations.VERBS:
            await alterations.ensure_possible(connection, session_id)
            await alterations.ensure_few_wait(connection, session_id)
        await connection.execute(
            "INSERT INTO commands (command_id, tenant_id, session_id, verb, argument, body)"
            " VALUES ($1, $2, $3, $4, $5, $6)",
            command_id,
            tenant_id,
            session_id,
            verb,
            dict(argument),
            body,
        )

    await db.run(work)


async def _ensure_allowed(
    connection: asyncpg.Connection, session_id: str, verb: str, state: State, ending: str | None
) -> None:
    if ending is not None and state not in TERMINAL:
        raise Conflict(f"session {session_id} is being {ending}: it takes no more commands")
    allowed, instead = _ALLOWED[verb]
    if state in allowed:
        return
    before = await connection.fetchval(  # a command that is accepted and not yet applied counts as if it were
        "SELECT verb FROM commands WHERE session_id = $1 AND state = 'accepted' ORDER BY seq DESC LIMIT 1", session_id
    )
    if verb == "resume" and before == "pause":
        return
    raise Conflict(f"session {session_id} is {state}: {instead}")


async def exists(db: Database, command_id: str) -> bool:
    return await db.fetchrow("SELECT 1 FROM commands WHERE command_id = $1", command_id) is not None


async def apply(db: Database, session_id: str, by: str = "") -> Applied:
    """Apply accepted commands in order, up to the first that changes the workspace, and expire what waited too long.
    Idempotent; nothing of the session may be running. `by`: a name for whoever asks, who is told again what was applied
    for him while his answer was lost.
    """

    async def work(connection: asyncpg.Connection) -> Applied:
        session = await locked_at_any_epoch(connection, session_id)
        if session is None or State(session.state) in (*TERMINAL, State.CANCELLING):
            return Applied()
        if await connection.fetchval("SELECT ending FROM sessions WHERE session_id = $1", session_id):
            return Applied()  # it rests, and stays so until it has ended
        await questions.expire(connection, session_id)
        rows = await connection.fetch(
            "SELECT * FROM commands WHERE session_id = $1 AND (state = 'accepted' OR applied_by = $2) ORDER BY seq",
            session_id,
            by,
        )
        moved = interrupt = alters = False
        for row in rows:
            if row["verb"] in alterations.VERBS:
                alters = True
                break
            if row["state"] == "accepted":
                done = await _apply_one(connection, session_id, row, by)
            else:
                done = Applied(row["led_to"] == "moved", row["led_to"] == "interrupt")
            # What a rewind left behind needs no interrupting.
            moved, interrupt = moved or done.moved, done.interrupt or (interrupt and not done.moved)
        await _stop_waiting(connection, session_id)
        return Applied(moved, interrupt, alters)

    return await db.run(work)


async def _apply_one(connection: asyncpg.Connection, session_id: str, row: asyncpg.Record, by: str) -> Applied:
    """One command; what cannot be done any more is refused, and says why."""
    done, error = Applied(), None
    try:
        async with connection.transaction():
            session = await locked_at_any_epoch(connection, session_id)
            assert session is not None
            done = await _VERBS[row["verb"]](connection, session, row["argument"])
    except (Conflict, InvalidRequest, IllegalTransition) as refusal:
        error = str(refusal)
        told = Event("command.refused", {"command_id": row["command_id"], "verb": row["verb"], "message": error})
        await events.append(connection, session_id, [told])
    else:
        applied = Event("command.applied", {"command_id": row["command_id"], "verb": row["verb"]})
        await events.append(connection, session_id, [applied])
    await connection.execute(
        "UPDATE commands SET state = $2, error = $3, done_at = now(), led_to = $4, applied_by = $5"
        " WHERE command_id = $1",
        row["command_id"],
        "refused" if error else "done",
        error,
        done.led_to,
        (by or None) if done.led_to else None,
    )
    return done


async def _pause(connection: asyncpg.Connection, session: Session, _: Mapping[str, Any]) -> Applied:
    if session.state != State.PAUSED:
        state = State(session.state)
        if state is State.PROVISIONING:  # nothing has begun: it rests
            state = await set_state(connection, session.session_id, state, Move.REST)
        await set_state(connection, session.session_id, state, Move.PAUSE)
        await connection.execute(
            "UPDATE attempts SET outcome = 'paused', ended_at = now() WHERE session_id = $1 AND outcome = 'running'",
            session.session_id,
        )
        await events.append(connection, session.session_id, [Event("session.paused")])
    return Applied()


async def _resume(connection: asyncpg.Connection, session: Session, _: Mapping[str, Any]) -> Applied:
    if session.state == State.PAUSED:
        await _go_on(connection, session, Event("session.resumed"))
    return Applied()


async def _retry(connection: asyncpg.Connection, session: Session, _: Mapping[str, Any]) -> Applied:
    """The step that failed begins anew, a think after its last durable token."""
    if session.state != State.FAILED:
        raise Conflict(f"the session is {session.state}, not failed, by now")
    step = await connection.fetchrow(
        "SELECT step_no, kind, state FROM steps WHERE session_id = $1 ORDER BY step_no DESC LIMIT 1", session.session_id
    )
    if step is not None and step["state"] == "failed" and step["kind"] == "input":
        await connection.execute(
            "UPDATE messages SET state = 'accepted' FROM steps s WHERE s.session_id = $1 AND s.step_no = $2"
            " AND messages.message_id = s.message_id",
            session.session_id,
            step["step_no"],
        )
        await connection.execute(
            "UPDATE steps SET message_id = NULL WHERE session_id = $1 AND step_no = $2",
            session.session_id,
            step["step_no"],
        )
    elif step is not None and step["state"] == "failed":
        await connection.execute(
            "UPDATE steps SET state = 'running', error = NULL, ended_at = NULL WHERE session_id = $1 AND step_no = $2",
            session.session_id,
            step["step_no"],
        )
    await _go_on(connection, session, Event("session.retried", {"step": step["step_no"] if step else None}))
    return Applied()


async def _rewind(connection: asyncpg.Connection, session: Session, argument: Mapping[str, Any]) -> Applied:
    await branches.rewind(
        connection, session.session_id, argument["step"], argument.get("seed"), bool(argument.get("resume"))
    )
    return Applied(moved=True)


async def _interrupt(connection: asyncpg.Connection, session: Session, _: Mapping[str, Any]) -> Applied:
    """What ran was ended by an activity of its own before this, unless word of it comes later than this."""
    return Applied(interrupt=await way_back(connection, session.session_id) is not Move.REST)


async def _answer(connection: asyncpg.Connection, session: Session, argument: Mapping[str, Any]) -> Applied:
    row = await connection.fetchrow("SELECT * FROM questions WHERE question_id = $1", argument["question_id"])
    if row["kind"] != "budget" or row["state"] != "answered":
        return Applied()
    if row["answer"]["decision"] == "stop":
        return Applied(interrupt=True)
    await budgets.raise_limits(connection, session, row["answer"]["budget"])
    return Applied()


_Verb = Callable[[asyncpg.Connection, Session, Mapping[str, Any]], Awaitable[Applied]]
_VERBS: Mapping[str, _Verb] = {
    "pause": _pause,
    "resume": _resume,
    "retry": _retry,
    "rewind": _rewind,
    "interrupt": _interrupt,
    "answer": _answer,
}


async def _stop_waiting(connection: asyncpg.Connection, session_id: str) -> None:
    """Once nothing is open any more, the step that asked goes on."""
    session = await locked_at_any_epoch(connection, session_id)
    if session is not None and session.state == State.WAITING:
        kinds = await questions.open_kinds(connection, session_id)
        if not kinds:
            await _go_on(connection, session, None)
        elif kinds[0] != session.waiting_for:
            await connection.execute("UPDATE sessions SET waiting_for = $2 WHERE session_id = $1", session_id, kinds[0])


async def _go_on(connection: asyncpg.Connection, session: Session, told: Event | None) -> None:
    """Back to where the record stands: to a question that is open, to the step that runs or comes next, or to rest."""
    kinds = await questions.open_kinds(connection, session.session_id)
    way = Move.WAIT if kinds and session.state == State.PAUSED else await way_back(connection, session.session_id)
    state = await set_state(
        connection, session.session_id, State(session.state), way, waiting_for=kinds[0] if way is Move.WAIT else None
    )
    rest = [Event("session.idle")] if state is State.IDLE else []
    if told is not None or rest:
        await events.append(connection, session.session_id, [*([told] if told else []), *rest])
