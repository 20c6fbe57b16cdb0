"""Changes of a workspace from outside: files that are put or removed, archives, commands that are run.

Each is a command of the session: accepted by its row, done in its turn, with nothing of the session running. It ends as
a step of kind `decision`, with a checkpoint of its own whose transcript is unchanged, so that fork, rewind and resume
see it as any other step.

A step that stands open (a session that waits, or was paused in a think) or that failed goes on behind the change: it
takes the number after it, with all that is durable of it. One of whose calls has begun stays where it is, since the
sandbox knows them by that number, and the change is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from runtime.errors import Conflict
from runtime.store import events
from runtime.store.database import Database
from runtime.store.held import locked
from runtime.store.sessions import set_state
from runtime.store.values import Event, Owner, Session
from workflows.states import Event as Move
from workflows.states import State

VERBS: Final = ("write", "remove", "unpack", "exec")
MOST_WAITING: Final = 64  # in one session


@dataclass(frozen=True)
class Asked:
    """A change that is next. `started_in`: the sandbox in which its command was begun, if it was."""

    command_id: str
    verb: str
    argument: Mapping[str, Any]
    body: bytes
    started_in: str | None


@dataclass(frozen=True)
class Made:
    """What came of it: the workspace, what is told of it, and what a command printed."""

    root: str
    result: Mapping[str, Any]
    output: bytes | None = None
    notes: Sequence[Event] = ()


async def next_one(db: Database, owner: Owner) -> tuple[Session, Asked | None, bool]:
    """The session, the change that is next, and whether a command of another kind comes before any. Raises
    StaleEpoch."""

    async def work(connection: asyncpg.Connection) -> tuple[Session, Asked | None, bool]:
        session = await locked(connection, owner.session_id, owner.epoch)
        row = await connection.fetchrow(
            "SELECT * FROM commands WHERE session_id = $1 AND state = 'accepted' ORDER BY seq LIMIT 1", owner.session_id
        )
        if row is None or row["verb"] not in VERBS:
            return session, None, row is not None
        asked = Asked(row["command_id"], row["verb"], row["argument"], row["body"] or b"", row["started_in"])
        return session, asked, False

    return await db.run(work)


async def ensure_possible(connection: asyncpg.Connection, session_id: str) -> None:
    """Raises Conflict where a call of the step that stands open, or failed, has begun."""
    begun = await connection.fetchrow(
        "SELECT s.step_no, s.state FROM steps s WHERE session_id = $1 AND step_no ="
        " (SELECT max(step_no) FROM steps WHERE session_id = $1) AND s.state IN ('running', 'failed')"
        " AND EXISTS (SELECT FROM tool_calls t WHERE t.session_id = $1 AND t.step_no = s.step_no AND t.runs > 0)",
        session_id,
    )
    if begun is not None:
        instead = "retry it first, or rewind" if begun["state"] == "failed" else "let it end, or interrupt it"
        raise Conflict(
            f"a call of step {begun['step_no']} has begun, and works on the workspace as it was then: {instead}",
            code="session_busy",
        )


async def ensure_few_wait(connection: asyncpg.Connection, session_id: str) -> None:
    """Raises Conflict where MOST_WAITING are to be made yet: what each came with is kept until then."""
    waiting = await connection.fetchval(
        "SELECT count(*) FROM commands WHERE session_id = $1 AND state = 'accepted' AND verb = ANY($2)",
        session_id,
        list(VERBS),
    )
    if waiting >= MOST_WAITING:
        raise Conflict(
            f"{waiting} changes of the workspace wait for their turn; send more once some of them are made",
            code="session_busy",
        )


async def check(db: Database, session_id: str) -> None:
    """Raises Conflict where a change is not possible as the session stands."""
    await db.run(lambda connection: ensure_possible(connection, session_id))


async def note_start(db: Database, owner: Owner, asked: Asked, sandbox_id: str) -> None:
    """Before it happens: a command is begun in a sandbox, whose journal is from now on the one that knows of it."""

    async def work(connection: asyncpg.Connection) -> None:
        await locked(connection, owner.session_id, owner.epoch)
        noted = await connection.fetchval(
            "UPDATE commands SET started_in = $2 WHERE command_id = $1 AND started_in IS NULL RETURNING true",
            asked.command_id,
            sandbox_id,
        )
        if noted:
            about = {"command_id": asked.command_id, "command": asked.argument["command"], "sandbox_id": sandbox_id}
            await events.append(connection, owner.session_id, [Event("exec.started", about)], epoch=owner.epoch)

    await db.run(work)


async def note_root(db: Database, asked: Asked, root: str) -> None:
    """A workspace whose blobs are stored, and that no checkpoint may come to name."""
    await db.execute(
        "UPDATE commands SET roots = roots || $2::text WHERE command_id = $1 AND NOT $2 = ANY(roots)",
        asked.command_id,
        root,
    )


async def refuse(
    db: Database, session_id: str, command_id: str, why: str, result: Mapping[str, Any] | None = None
) -> None:
    """The change cannot be made. `result`: the status and code that its caller is told. Idempotent."""

    async def work(connection: asyncpg.Connection) -> None:
        await connection.execute("SELECT FROM sessions WHERE session_id = $1 FOR UPDATE", session_id)
        verb = await connection.fetchval(
            "UPDATE commands SET state = 'refused', error = $2, result = $3, body = NULL, done_at = now()"
            " WHERE command_id = $1 AND state = 'accepted' RETURNING verb",
            command_id,
            why,
            None if result is None else dict(result),
        )
        if verb is not None:
            told = Event("command.refused", {"command_id": command_id, "verb": verb, "message": why})
            await events.append(connection, session_id, [told])
            await _leave_provisioning(connection, session_id)

    await db.run(work)


async def refuse_next(db: Database, session_id: str, why: str) -> None:
    """The change that is next cannot be made at any node."""
    row = await db.fetchrow(
        "SELECT command_id, verb FROM commands WHERE session_id = $1 AND state = 'accepted' ORDER BY seq LIMIT 1",
        session_id,
    )
    if row is not None and row["verb"] in VERBS:
        await refuse(db, session_id, row["command_id"], why)


async def settle(db: Database, owner: Owner, asked: Asked, made: Made, fingerprint: str) -> None:
    """The change is made: its step, its checkpoint, its events. Repeated: a no-op. Raises StaleEpoch, Conflict.

    `fingerprint`: of the model that is served, for a session that has no checkpoint yet.
    """

    async def work(connection: asyncpg.Connection) -> None:
        session = await locked(connection, owner.session_id, owner.epoch)
        state = await connection.fetchval("SELECT state FROM commands WHERE command_id = $1", asked.command_id)
        if state != "accepted":
            return
        await ensure_possible(connection, owner.session_id)
        step_no = await _decide(connection, session, asked, made, fingerprint)
        await connection.execute(
            "UPDATE commands SET state = 'done', result = $2, output = $3, body = NULL, done_at = now()"
            " WHERE command_id = $1",
            asked.command_id,
            {**made.result, "step": step_no},
            made.output,
        )
        changed = {"command_id": asked.command_id, "by": asked.verb, "workspace": made.root}
        told = [
            *made.notes,
            Event("workspace.changed", {**changed, "path": asked.argument.get("path")}),
            Event("command.applied", {"command_id": asked.command_id, "verb": asked.verb}),
        ]
        await events.append(connection, owner.session_id, told, step_no=step_no)
        await _leave_provisioning(connection, owner.session_id)

    await db.run(work)


async def _leave_provisioning(connection: asyncpg.Connection, session_id: str) -> None:
    """A session that has had no message rests."""
    state = State(await connection.fetchval("SELECT state FROM sessions WHERE session_id = $1", session_id))
    if state is State.PROVISIONING:
        await set_state(connection, session_id, state, Move.REST)
        await events.append(connection, session_id, [Event("session.idle")])


async def _decide(connection: asyncpg.Connection, session: Session, asked: Asked, made: Made, fingerprint: str) -> int:
    session_id = session.session_id
    standing = await connection.fetchrow(
        "SELECT * FROM steps WHERE session_id = $1 AND state IN ('running', 'failed')"
        " AND step_no = (SELECT max(step_no) FROM steps WHERE session_id = $1)",
        session_id,
    )
    parent = await connection.fetchrow(
        "SELECT step_no, kind, output FROM steps WHERE session_id = $1 AND live AND state = 'completed'"
        " ORDER BY step_no DESC LIMIT 1",
        session_id,
    )
    output = {"decision": asked.verb, "command_id": asked.command_id, "after": _after(parent)}
    step_no: int = await connection.fetchval(
        "INSERT INTO steps (session_id, step_no, tenant_id, parent_no, kind, state, token_start, output, ended_at)"
        " SELECT $1, 1 + coalesce((SELECT max(step_no) FROM steps WHERE session_id = $1), 0), $2, $3, 'decision',"
        " 'completed', coalesce((SELECT token_count FROM checkpoints WHERE session_id = $1 AND step_no = $3), 0), $4,"
        " now() RETURNING step_no",
        session_id,
        session.tenant_id,
        parent["step_no"] if parent else None,
        output,
    )
    await _checkpoint(connection, session, step_no, parent["step_no"] if parent else 0, made.root, fingerprint)
    if standing is not None:
        await _put_behind(connection, standing, step_no, made.root)
    return step_no


def _after(parent: asyncpg.Record | None) -> dict[str, Any]:
    """What the session goes on after: a change moves nothing on."""
    if parent is None:
        return {"kind": "", "outcome": ""}
    output = parent["output"] or {}
    after = output.get("after") or {"kind": parent["kind"], "outcome": output.get("outcome", "")}
    return {**after, "compacted": True} if parent["kind"] == "compaction" else dict(after)


async def _checkpoint(
    connection: asyncpg.Connection, session: Session, step_no: int, parent_no: int, root: str, fingerprint: str
) -> None:
    """As the one before it, but for the workspace."""
    await connection.execute(
        "INSERT INTO checkpoints (session_id, step_no, tenant_id, token_count, token_digest, seed, sampler_pos,"
        " fingerprint, kv_group, kv_shard, kv_shards, kv_tail, kv_new, ledger_pos, workspace_root)"
        " SELECT $1, $2, $3, coalesce(c.token_count, 0), coalesce(c.token_digest, $5), $6, coalesce(c.sampler_pos, 0),"
        " coalesce(c.fingerprint, $7), coalesce(c.kv_group, 0), coalesce(c.kv_shard, 0), coalesce(c.kv_shards, 1),"
        " c.kv_tail, '{}', coalesce(c.ledger_pos, 0), $8"
        " FROM (VALUES (1)) AS one LEFT JOIN checkpoints c ON c.session_id = $1 AND c.step_no = $4",
        session.session_id,
        step_no,
        session.tenant_id,
        parent_no,
        hashlib.sha256().digest(),
        session.seed,
        fingerprint,
        root,
    )
    about = {"workspace": root, "pages": 0}
    await events.append(connection, session.session_id, [Event("checkpoint.created", about)], step_no=step_no)


async def _put_behind(connection: asyncpg.Connection, step: asyncpg.Record, decision: int, root: str) -> None:
    """The step that stands open, or failed, takes the number after the change."""
    key, to = (step["session_id"], step["step_no"]), decision + 1
    moved = {"message": f"the workspace was changed first: it goes on as step {to}"}
    await connection.execute(
        "UPDATE steps SET state = 'cancelled', live = false, message_id = NULL, error = $3, ended_at = now()"
        " WHERE session_id = $1 AND step_no = $2",
        *key,
        moved,
    )
    await connection.execute(
        "INSERT INTO steps (session_id, step_no, tenant_id, parent_no, kind, state, token_start, token_count, attempts,"
        " message_id, output, error, started_at, ended_at)"
        " SELECT session_id, $3, tenant_id, $4, kind, $5, token_start, token_count, attempts, $6, output, $7,"
        " started_at, $8 FROM steps WHERE session_id = $1 AND step_no = $2",
        *key,
        to,
        decision,
        step["state"],
        step["message_id"],
        step["error"],
        step["ended_at"],
    )
    await connection.execute(
        "INSERT INTO segments (session_id, step_no, idx, tenant_id, kind, token_ids)"
        " SELECT session_id, $3, idx, tenant_id, kind, token_ids FROM segments WHERE session_id = $1 AND step_no = $2",
        *key,
        to,
    )
    await connection.execute(
        "UPDATE attempts SET outcome = 'lost', ended_at = now()"
        " WHERE session_id = $1 AND step_no = $2 AND outcome = 'running'",
        *key,
    )
    await connection.execute(
        "UPDATE tool_calls SET step_no = $3, snapshot_before = $4 WHERE session_id = $1 AND step_no = $2",
        *key,
        to,
        root,
    )
    await connection.execute("UPDATE questions SET step_no = $3 WHERE session_id = $1 AND step_no = $2", *key, to)


@dataclass(frozen=True)
class Outcome:
    """How a change stands: accepted, done or refused."""

    command_id: str
    verb: str
    state: str
    error: str | None
    result: Mapping[str, Any] | None
    output: bytes | None


async def outcome(db: Database, session_id: str, command_id: str) -> Outcome | None:
    row = await db.fetchrow(
        "SELECT command_id, verb, state, error, result, output FROM commands"
        " WHERE session_id = $1 AND command_id = $2 AND verb = ANY($3)",
        session_id,
        command_id,
        list(VERBS),
    )
    return Outcome(**dict(row)) if row else None
