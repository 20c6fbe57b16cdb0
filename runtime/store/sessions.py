"""Sessions and messages: acceptance, state, placement, ending."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import asyncpg

from runtime.agents import Origin
from runtime.errors import Conflict, NotFound
from runtime.store import domains, events, quotas
from runtime.store.database import Database
from runtime.store.held import COLUMNS, SOURCE, locked, session_of
from runtime.store.values import Event, Session
from workflows.states import TERMINAL, State, transition
from workflows.states import Event as Move

UNKNOWN = Origin()


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


async def create(
    db: Database,
    tenant_id: str,
    session_id: str,
    config: Mapping[str, Any],
    seed: int,
    *,
    domain: str | None = None,
    parent: tuple[str, int, int] | None = None,
    origin: Origin = UNKNOWN,
) -> None:
    """Accept a session. Repeated with the same id: a no-op. `domain`: the sharing domain of its pages, made if need be;
    None: its tenant's pages, for ever. `parent`: the session, step and call whose tool this one is. Raises Forbidden
    where the tenant has all the sessions, or workspaces, that it may have."""

    async def work(connection: asyncpg.Connection) -> None:
        await quotas.ensure_room_for_session(connection, tenant_id, session_id, config)
        if domain is not None:
            await domains.ensure(connection, tenant_id, domain)
        made = await connection.fetchval(
            "INSERT INTO sessions"
            " (session_id, tenant_id, config, seed, kv_domain, parent_id, parent_step, parent_call,"
            " agent_name, agent_version, schedule_id, metadata)"
            " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) ON CONFLICT DO NOTHING RETURNING true",
            session_id,
            tenant_id,
            dict(config),
            seed,
            domain,
            *(parent or (None, None, None)),
            origin.agent,
            origin.version,
            origin.schedule_id,
            dict(origin.metadata),
        )
        if made:
            about = {"session_id": session_id, "model": config["model"], "seed": seed}
            if parent is not None:
                about |= {"parent": parent[0], "step": parent[1], "call": parent[2]}
            await events.append(connection, session_id, [Event("session.created", about)])

    await db.run(work)


async def accept_message(
    db: Database,
    tenant_id: str,
    session_id: str,
    message_id: str,
    content: str,
    options: Mapping[str, Any],
    *,
    on_busy: str = "enqueue",
) -> None:
    """Accept a message: from here on it is never lost. Repeated with the same id: a no-op, whatever became of the
    session. Raises NotFound; Conflict when the session has ended, or is busy and the message is not to wait (`on_busy`
    is `reject`); TooManyRequests where the tenant has used its tokens of the day."""

    async def work(connection: asyncpg.Connection) -> None:
        row = await connection.fetchrow(
            "SELECT state, ending FROM sessions WHERE session_id = $1 AND tenant_id = $2 FOR UPDATE",
            session_id,
            tenant_id,
        )
        if row is None:
            raise NotFound(f"there is no session {session_id}")
        if await connection.fetchval("SELECT true FROM messages WHERE message_id = $1", message_id):
            return
        if row["state"] in TERMINAL or row["state"] == State.CANCELLING or row["ending"]:
            state = row["state"] if row["state"] in TERMINAL else f"being {row['ending'] or 'cancelled'}"
            raise Conflict(f"session {session_id} is {state} and takes no more messages; create a new one")
        await quotas.ensure_tokens(connection, tenant_id)
        if on_busy == "reject":
            await _ensure_free(connection, session_id, row["state"])
        await connection.execute(
            "INSERT INTO messages (message_id, tenant_id, session_id, content, options) VALUES ($1, $2, $3, $4, $5)",
            message_id,
            tenant_id,
            session_id,
            content,
            {**options, "on_busy": on_busy},
        )
        accepted = Event("message.accepted", {"message_id": message_id, "content": content})
        await events.append(connection, session_id, [accepted])

    await db.run(work)


async def _ensure_free(connection: asyncpg.Connection, session_id: str, state: str) -> None:
    """Raises Conflict (session_busy) where a message would have to wait."""
    waiting = await connection.fetchval(
        "SELECT true FROM messages WHERE session_id = $1 AND state = 'accepted' LIMIT 1", session_id
    )
    if waiting or state not in (State.CREATED, State.IDLE, State.FAILED):
        raise Conflict(
            f"session {session_id} is busy ({state}); wait until it rests, or send with on_busy enqueue or interrupt",
            code="session_busy",
        )


async def request_end(db: Database, tenant_id: str, session_id: str, how: str = "cancelled") -> str:
    """Accept that a session ends; the workflow frees what is held. Idempotent; returns the state.

    A cancel says so in the state at once. Only a session at rest can be `completed`; others raise Conflict.
    """

    async def work(connection: asyncpg.Connection) -> str:
        row = await connection.fetchrow(
            "SELECT state, ending FROM sessions WHERE session_id = $1 AND tenant_id = $2 FOR UPDATE",
            session_id,
            tenant_id,
        )
        if row is None:
            raise NotFound(f"there is no session {session_id}")
        state = State(row["state"])
        if state in TERMINAL or state is State.CANCELLING or (row["ending"] and how == "completed"):
            return str(state)
        if how == "completed":
            await _ensure_at_rest(connection, session_id, state)
        await connection.execute("UPDATE sessions SET ending = $2 WHERE session_id = $1", session_id, how)
        if how == "cancelled":
            state = await set_state(connection, session_id, state, Move.CANCEL)
            await events.append(connection, session_id, [Event("session.cancelling")])
        return str(state)

    return await db.run(work)


async def _ensure_at_rest(connection: asyncpg.Connection, session_id: str, state: State) -> None:
    waiting = await connection.fetchval(
        "SELECT count(*) FROM messages WHERE session_id = $1 AND state = 'accepted'", session_id
    )
    if state is not State.IDLE or waiting:
        more = f" with {waiting} messages waiting" if waiting else ""
        raise Conflict(
            f"session {session_id} is {state}{more}: only one at rest can be completed; wait, or cancel it instead"
        )


async def place(db: Database, session_id: str, node_id: str, node_boot: str) -> Session:
    """Take the session over: the epoch rises, whoever held it before can write no more."""

    async def work(connection: asyncpg.Connection) -> Session:
        epoch = await connection.fetchval(
            "UPDATE sessions SET epoch = epoch + 1, node_id = $2, node_boot = $3, updated_at = now()"
            " WHERE session_id = $1 RETURNING epoch",
            session_id,
            node_id,
            node_boot,
        )
        if epoch is None:
            raise NotFound(f"there is no session {session_id}")
        session = await locked(connection, session_id, epoch)
        if session.state == State.CREATED:
            await move(connection, session, Move.PROVISION)
        placed = Event("session.placed", {"node": node_id, "epoch": epoch})
        await events.append(connection, session_id, [placed])
        return session

    return await db.run(work)


async def fail(db: Database, session_id: str, message: str) -> None:
    """The session cannot go on as asked. Its running step ends as failed; the session itself lives on."""

    async def work(connection: asyncpg.Connection) -> None:
        state = State(
            await connection.fetchval("SELECT state FROM sessions WHERE session_id = $1 FOR UPDATE", session_id)
        )
        if state in TERMINAL or state in (State.CANCELLING, State.FAILED):
            return
        await end_running_step(connection, session_id, "failed", message)
        await void_questions(connection, session_id)
        if state in (State.CREATED, State.PAUSED):  # what was paused may have been interrupted, in vain
            way = Move.PROVISION if state is State.CREATED else Move.REST
            state = await set_state(connection, session_id, state, way)
        await set_state(connection, session_id, state, Move.FAIL, error={"message": message})
        await events.append(connection, session_id, [Event("session.failed", {"message": message})])

    await db.run(work)


async def finish(db: Database, session_id: str, how: str, left: Mapping[str, Any]) -> None:
    """Everything that the session held is free; say so. Idempotent. One that was to be completed and is not at rest
    any more, since it was cancelled meanwhile, ends as cancelled."""

    async def work(connection: asyncpg.Connection) -> None:
        state = State(
            await connection.fetchval("SELECT state FROM sessions WHERE session_id = $1 FOR UPDATE", session_id)
        )
        if state in TERMINAL:
            return
        await end_running_step(connection, session_id, "cancelled", "the session was cancelled")
        await void_questions(connection, session_id)
        await _refuse_commands(connection, session_id)
        if how == "completed" and state is State.IDLE:
            state = await set_state(connection, session_id, state, Move.COMPLETE)
        else:
            if state != State.CANCELLING:
                await set_state(connection, session_id, state, Move.CANCEL)
            state = await set_state(connection, session_id, State.CANCELLING, Move.CLEANED)
        await events.append(connection, session_id, [Event(f"session.{state}", dict(left))])
        await domains.end_unused(connection, session_id)

    await db.run(work)


async def _refuse_commands(connection: asyncpg.Connection, session_id: str) -> None:
    """Whatever was accepted and not applied will not be."""
    rows = await connection.fetch(
        "UPDATE commands SET state = 'refused', error = 'the session has ended', done_at = now()"
        " WHERE session_id = $1 AND state = 'accepted' RETURNING command_id, verb, error AS message",
        session_id,
    )
    if rows:
        await events.append(connection, session_id, [Event("command.refused", dict(row)) for row in rows])


async def get(db: Database, session_id: str) -> Session:
    row = await db.fetchrow(f"SELECT {COLUMNS} {SOURCE}", session_id)
    if row is None:
        raise NotFound(f"there is no session {session_id}")
    return session_of(row)


async def move(connection: asyncpg.Connection, session: Session, event: Move) -> None:
    """Apply a transition, unless the session is already where it leads. Raises IllegalTransition."""
    if after_move(session, event) != session.state:
        await set_state(connection, session.session_id, State(session.state), event)


def after_move(session: Session, event: Move) -> State:
    """The state that a transition leads to, be the session there already or not. Raises IllegalTransition."""
    state = State(session.state)
    there = {Move.THINK: State.THINKING, Move.RUN_TOOL: State.TOOL_RUNNING, Move.REST: State.IDLE}.get(event)
    return state if state == there else transition(state, event)


async def message_to_take(db: Database, session_id: str, step_no: int) -> tuple[str, str, dict[str, Any]] | None:
    """Id, content and options of the message that an input step takes: the one it began with, else the oldest.

    Deliveries may overtake each other; what was accepted first is answered first.
    """
    row = await db.fetchrow(
        "SELECT m.message_id, m.content, m.options FROM messages m"
        " LEFT JOIN steps s ON s.message_id = m.message_id AND s.session_id = $1 AND s.step_no = $2"
        " WHERE m.session_id = $1 AND (s.step_no IS NOT NULL OR m.state = 'accepted')"
        " ORDER BY s.step_no IS NULL, m.seq LIMIT 1",
        session_id,
        step_no,
    )
    return (row["message_id"], row["content"], row["options"]) if row else None


async def message_exists(db: Database, message_id: str) -> bool:
    return await db.fetchrow("SELECT 1 FROM messages WHERE message_id = $1", message_id) is not None


async def has_ended(db: Database, session_id: str) -> bool:
    """Whether nothing will happen to the session any more."""
    row = await db.fetchrow("SELECT state FROM sessions WHERE session_id = $1", session_id)
    return row is None or row["state"] in TERMINAL


async def set_state(
    connection: asyncpg.Connection,
    session_id: str,
    state: State,
    event: Move,
    *,
    error: dict[str, Any] | None = None,
    waiting_for: str | None = None,
) -> State:
    """Apply a transition to the row, which the caller has locked. Raises IllegalTransition, Conflict."""
    target = transition(state, event)
    moved = await connection.fetchval(
        "UPDATE sessions SET state = $3, error = $4, waiting_for = $5, updated_at = now()"
        " WHERE session_id = $1 AND state = $2 RETURNING true",
        session_id,
        str(state),
        str(target),
        error,
        waiting_for,
    )
    if not moved:
        raise Conflict(f"session {session_id} is no longer {state}")
    return target


async def void_questions(connection: asyncpg.Connection, session_id: str) -> None:
    """Open questions whose step will not go on. The session's row is locked."""
    await connection.execute(
        "UPDATE questions SET state = 'void', answered_at = now() WHERE session_id = $1 AND state = 'open'", session_id
    )


async def end_running_step(
    connection: asyncpg.Connection, session_id: str, state: str, message: str, *, keep_message: bool = False
) -> None:
    """The step that runs will not go on. `keep_message`: what an input step was taking is to be taken later."""
    step_no = await connection.fetchval(
        "UPDATE steps SET state = $2, error = $3, ended_at = now()"
        " WHERE session_id = $1 AND state = 'running' RETURNING step_no",
        session_id,
        state,
        {"message": message},
    )
    if step_no is None:
        return
    if keep_message:
        await connection.execute(
            "UPDATE steps SET message_id = NULL WHERE session_id = $1 AND step_no = $2", session_id, step_no
        )
    # A message whose step failed was answered, with its error; it is not delivered again.
    await connection.execute(
        "UPDATE messages SET state = 'consumed' FROM steps s WHERE s.session_id = $1 AND s.step_no = $2"
        " AND messages.message_id = s.message_id",
        session_id,
        step_no,
    )
    await connection.execute(
        "UPDATE attempts SET outcome = $3, ended_at = now()"
        " WHERE session_id = $1 AND step_no = $2 AND outcome = 'running'",
        session_id,
        step_no,
        state,
    )
    await events.append(connection, session_id, [Event(f"step.{state}", {"message": message})], step_no=step_no)
