"""Sessions and messages: acceptance, state, placement, ending."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import asyncpg

from runtime.errors import Conflict, NotFound, StaleEpoch
from runtime.store import domains, events
from runtime.store.database import Database
from runtime.store.values import Event, Session
from workflows.states import TERMINAL, State, transition
from workflows.states import Event as Move


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


async def create(
    db: Database, tenant_id: str, session_id: str, config: Mapping[str, Any], seed: int, *, domain: str | None = None
) -> None:
    """Accept a session. Repeated with the same id: a no-op. `domain`: the sharing domain of its pages, made if need be;
    None: its tenant's pages, for ever."""

    async def work(connection: asyncpg.Connection) -> None:
        if domain is not None:
            await domains.ensure(connection, tenant_id, domain)
        made = await connection.fetchval(
            "INSERT INTO sessions (session_id, tenant_id, config, seed, kv_domain) VALUES ($1, $2, $3, $4, $5)"
            " ON CONFLICT DO NOTHING RETURNING true",
            session_id,
            tenant_id,
            dict(config),
            seed,
            domain,
        )
        if made:
            created = Event("session.created", {"session_id": session_id, "model": config["model"], "seed": seed})
            await events.append(connection, session_id, [created])

    await db.run(work)


async def accept_message(
    db: Database, tenant_id: str, session_id: str, message_id: str, content: str, options: Mapping[str, Any]
) -> None:
    """Accept a message: from here on it is never lost. Raises NotFound, Conflict when the session has ended."""

    async def work(connection: asyncpg.Connection) -> None:
        state = await connection.fetchval(
            "SELECT state FROM sessions WHERE session_id = $1 AND tenant_id = $2 FOR UPDATE",
            session_id,
            tenant_id,
        )
        if state is None:
            raise NotFound(f"there is no session {session_id}")
        if state in TERMINAL or state == State.CANCELLING:
            raise Conflict(f"session {session_id} is {state} and takes no more messages; create a new one")
        made = await connection.fetchval(
            "INSERT INTO messages (message_id, tenant_id, session_id, content, options) VALUES ($1, $2, $3, $4, $5)"
            " ON CONFLICT DO NOTHING RETURNING true",
            message_id,
            tenant_id,
            session_id,
            content,
            dict(options),
        )
        if made:
            accepted = Event("message.accepted", {"message_id": message_id, "content": content})
            await events.append(connection, session_id, [accepted])

    await db.run(work)


async def request_end(db: Database, tenant_id: str, session_id: str) -> str:
    """Accept a cancel: the state says so at once, the workflow frees what is held. Idempotent; returns the state."""

    async def work(connection: asyncpg.Connection) -> str:
        row = await connection.fetchrow(
            "SELECT state FROM sessions WHERE session_id = $1 AND tenant_id = $2 FOR UPDATE",
            session_id,
            tenant_id,
        )
        if row is None:
            raise NotFound(f"there is no session {session_id}")
        if State(row["state"]) in TERMINAL or row["state"] == State.CANCELLING:
            return str(row["state"])
        await _set_state(connection, session_id, State(row["state"]), Move.CANCEL)
        await events.append(connection, session_id, [Event("session.cancelling")])
        return str(State.CANCELLING)

    return await db.run(work)


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
        await _end_running_step(connection, session_id, "failed", message)
        if state == State.CREATED:
            await _set_state(connection, session_id, state, Move.PROVISION)
            state = State.PROVISIONING
        await _set_state(connection, session_id, state, Move.FAIL, error={"message": message})
        await events.append(connection, session_id, [Event("session.failed", {"message": message})])

    await db.run(work)


async def finish(db: Database, session_id: str, how: str, left: Mapping[str, Any]) -> None:
    """Everything that the session held is free; say so. Idempotent."""

    async def work(connection: asyncpg.Connection) -> None:
        state = State(
            await connection.fetchval("SELECT state FROM sessions WHERE session_id = $1 FOR UPDATE", session_id)
        )
        if state in TERMINAL:
            return
        await _end_running_step(connection, session_id, "cancelled", "the session was cancelled")
        if how == "completed":
            await _set_state(connection, session_id, state, Move.COMPLETE)
        else:
            if state != State.CANCELLING:
                await _set_state(connection, session_id, state, Move.CANCEL)
            await _set_state(connection, session_id, State.CANCELLING, Move.CLEANED)
        await events.append(connection, session_id, [Event(f"session.{how}", dict(left))])
        await domains.end_unused(connection, session_id)

    await db.run(work)


async def get(db: Database, session_id: str) -> Session:
    row = await db.fetchrow(_SELECT, session_id)
    if row is None:
        raise NotFound(f"there is no session {session_id}")
    return _session(row)


async def locked(connection: asyncpg.Connection, session_id: str, epoch: int) -> Session:
    """The session's row, locked, if it is still held at `epoch`. Raises StaleEpoch."""
    row = await connection.fetchrow(_SELECT + " FOR UPDATE OF s", session_id)
    if row is None or row["epoch"] != epoch:
        raise StaleEpoch(f"session {session_id} is no longer held at epoch {epoch}")
    return _session(row)


async def move(connection: asyncpg.Connection, session: Session, event: Move) -> None:
    """Apply a transition, unless the session is already where it leads. Raises IllegalTransition."""
    state = State(session.state)
    target = {Move.THINK: State.THINKING, Move.RUN_TOOL: State.TOOL_RUNNING, Move.REST: State.IDLE}.get(event)
    if state != target:
        await _set_state(connection, session.session_id, state, event)


async def message_to_take(db: Database, session_id: str, step_no: int) -> tuple[str, str] | None:
    """Id and content of the message that an input step takes: the one it began with, else the oldest that waits.

    Deliveries may overtake each other; what was accepted first is answered first.
    """
    row = await db.fetchrow(
        "SELECT m.message_id, m.content FROM messages m"
        " LEFT JOIN steps s ON s.message_id = m.message_id AND s.session_id = $1 AND s.step_no = $2"
        " WHERE m.session_id = $1 AND (s.step_no IS NOT NULL OR m.state = 'accepted')"
        " ORDER BY s.step_no IS NULL, m.seq LIMIT 1",
        session_id,
        step_no,
    )
    return (row["message_id"], row["content"]) if row else None


async def message_exists(db: Database, message_id: str) -> bool:
    return await db.fetchrow("SELECT 1 FROM messages WHERE message_id = $1", message_id) is not None


async def has_ended(db: Database, session_id: str) -> bool:
    """Whether nothing will happen to the session any more."""
    row = await db.fetchrow("SELECT state FROM sessions WHERE session_id = $1", session_id)
    return row is None or row["state"] in TERMINAL


_SELECT = (
    "SELECT s.session_id, s.tenant_id, s.state, s.config, s.seed, s.epoch, coalesce(d.salt, t.salt) AS salt"
    " FROM sessions s JOIN tenants t USING (tenant_id) LEFT JOIN kv_domains d ON d.domain_id = s.kv_domain"
    " WHERE s.session_id = $1"
)


def _session(row: asyncpg.Record) -> Session:
    return Session(
        row["session_id"],
        row["tenant_id"],
        row["state"],
        row["config"],
        row["seed"],
        row["epoch"],
        row["salt"],
    )


async def _set_state(
    connection: asyncpg.Connection,
    session_id: str,
    state: State,
    event: Move,
    error: dict[str, Any] | None = None,
) -> None:
    moved = await connection.fetchval(
        "UPDATE sessions SET state = $3, error = $4, updated_at = now()"
        " WHERE session_id = $1 AND state = $2 RETURNING true",
        session_id,
        str(state),
        str(transition(state, event)),
        error,
    )
    if not moved:
        raise Conflict(f"session {session_id} is no longer {state}")


async def _end_running_step(connection: asyncpg.Connection, session_id: str, state: str, message: str) -> None:
    step_no = await connection.fetchval(
        "UPDATE steps SET state = $2, error = $3, ended_at = now()"
        " WHERE session_id = $1 AND state = 'running' RETURNING step_no",
        session_id,
        state,
        {"message": message},
    )
    if step_no is None:
        return
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
