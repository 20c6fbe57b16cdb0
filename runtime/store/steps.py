"""Steps, attempts, the transcript and checkpoints: every write fenced by the epoch, every one safe to repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg

from runtime.errors import StaleEpoch
from runtime.store import events
from runtime.store.database import Database
from runtime.store.sessions import locked, move
from runtime.store.values import Attempt, Checkpoint, Event, Owner, Segment
from workflows.contract import Progress
from workflows.states import Event as Move


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
) -> Attempt:
    """Open an attempt of a step, creating the step if it is new.

    `token` names this execution, so that a repeated call opens no second attempt; `opening` is the first segment of
    a new step. If the step has completed, its output is in `done` and nothing is written. Raises StaleEpoch,
    IllegalTransition.
    """

    async def work(connection: asyncpg.Connection) -> Attempt:
        session = await locked(connection, owner.session_id, owner.epoch)
        step = await connection.fetchrow(
            "SELECT * FROM steps WHERE session_id = $1 AND step_no = $2", owner.session_id, step_no
        )
        if step is not None and step["state"] == "completed":
            return Attempt(session, step_no, step["attempts"], step["token_start"], (), step["output"])
        if step is None:
            step = await _insert(connection, owner, session.tenant_id, step_no, kind, message_id)
        durable = await _segments_of(connection, owner.session_id, step_no)
        if opening is not None and not durable:
            await _add_segments(connection, owner.session_id, session.tenant_id, step_no, [opening])
            durable = (opening,)
        attempt_no, fresh = await _open_attempt(connection, owner, session.tenant_id, step, token, durable)
        if to is not None:
            await move(connection, session, to)
        if fresh:
            kept = sum(len(s.token_ids) for s in durable if s.kind == "model")
            about = {"kind": kind, "node": owner.node_id, "epoch": owner.epoch}
            if message_id is not None:
                about["message_id"] = message_id
            retried = Event("step.retrying", {**about, "keep": kept})
            event = Event("step.started", about) if attempt_no == 1 else retried
            await events.append(connection, owner.session_id, [event], step_no=step_no, attempt_no=attempt_no)
        return Attempt(session, step_no, attempt_no, step["token_start"], durable, None)

    return await db.run(work)


async def append_tokens(
    db: Database, owner: Owner, attempt: Attempt, offset: int, token_ids: Sequence[int], text: str
) -> None:
    """Make sampled tokens durable, with the event that shows them. `offset`: sampled tokens of the step before these.

    Already there: a no-op. Not the next ones: StaleEpoch, since another attempt is writing.
    """

    async def work(connection: asyncpg.Connection) -> None:
        await locked(connection, owner.session_id, owner.epoch)
        durable = await connection.fetchval(
            "SELECT coalesce(sum(cardinality(token_ids)), 0) FROM segments"
            " WHERE session_id = $1 AND step_no = $2 AND kind = 'model'",
            owner.session_id,
            attempt.step_no,
        )
        if durable >= offset + len(token_ids):
            return
        if durable != offset:
            raise StaleEpoch(f"step {attempt.step_no} has {durable} durable tokens, not {offset}")
        await _add_segments(
            connection,
            owner.session_id,
            attempt.session.tenant_id,
            attempt.step_no,
            [Segment("model", token_ids)],
        )
        delta = Event("model.delta", {"text": text, "token_ids": list(token_ids), "offset": offset})
        await events.append(
            connection, owner.session_id, [delta], step_no=attempt.step_no, attempt_no=attempt.attempt_no
        )

    await db.run(work)


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
) -> None:
    """End a step: its last segments, its checkpoint and its events in one transaction. Repeated: a no-op."""

    async def work(connection: asyncpg.Connection) -> None:
        session = await locked(connection, owner.session_id, owner.epoch)
        state = await connection.fetchval(
            "SELECT state FROM steps WHERE session_id = $1 AND step_no = $2",
            owner.session_id,
            attempt.step_no,
        )
        if state == "completed":
            return
        await _add_segments(connection, owner.session_id, attempt.session.tenant_id, attempt.step_no, segments)
        await connection.execute(
            "UPDATE steps SET state = 'completed', output = $3, token_count = $4, ended_at = now()"
            " WHERE session_id = $1 AND step_no = $2",
            owner.session_id,
            attempt.step_no,
            output,
            checkpoint.token_count - attempt.token_start,
        )
        await _close_attempt(connection, attempt, "completed", None)
        if output.get("message_id"):
            await connection.execute(
                "UPDATE messages SET state = 'consumed' WHERE message_id = $1", output["message_id"]
            )
        await _insert_checkpoint(connection, attempt, checkpoint)
        if to is not None and session.state != "cancelling":
            await move(connection, session, to)
        completed = Event("step.completed", {k: v for k, v in output.items() if k != "text"})
        made = Event(
            "checkpoint.created",
            {
                "tokens": checkpoint.token_count,
                "workspace": checkpoint.workspace_root,
                "pages": len(checkpoint.kv_new),
            },
        )
        await events.append(
            connection,
            owner.session_id,
            [*notes, completed, made, *([Event("session.idle")] if to is Move.REST else [])],
            step_no=attempt.step_no,
            attempt_no=attempt.attempt_no,
        )

    await db.run(work)


async def abandon(db: Database, owner: Owner, attempt: Attempt, outcome: str, message: str) -> None:
    """Note how an attempt ended without completing the step (lost, failed, cancelled). Never raises StaleEpoch."""

    async def work(connection: asyncpg.Connection) -> None:
        await _close_attempt(connection, attempt, outcome, {"message": message})

    await db.run(work, patience_s=5)


async def transcript(db: Database, session_id: str, before_step: int) -> list[int]:
    """Token ids of the completed steps before `before_step`, in order."""
    rows = await db.fetch(
        "SELECT g.token_ids FROM segments g JOIN steps s USING (session_id, step_no)"
        " WHERE session_id = $1 AND step_no < $2 AND s.state = 'completed' ORDER BY step_no, idx",
        session_id,
        before_step,
    )
    return [token for row in rows for token in row["token_ids"]]


async def progress(connection: asyncpg.Connection, session_id: str) -> Progress:
    """Where the record stands, read from the last step that ended."""
    last = await connection.fetchrow(
        "SELECT step_no, kind, state, output FROM steps WHERE session_id = $1 AND state <> 'running'"
        " ORDER BY step_no DESC LIMIT 1",
        session_id,
    )
    if last is None:
        return Progress()
    entry = await connection.fetchrow(
        "SELECT s.step_no, m.options FROM steps s JOIN messages m USING (message_id)"
        " WHERE s.session_id = $1 AND s.kind = 'input' AND s.state = 'completed' ORDER BY s.step_no DESC LIMIT 1",
        session_id,
    )
    options = entry["options"] if entry else {}
    rounds = await connection.fetchval(
        "SELECT count(*) FROM steps WHERE session_id = $1 AND kind = 'tool' AND state = 'completed' AND step_no > $2",
        session_id,
        entry["step_no"] if entry else 0,
    )
    return Progress(
        step_no=last["step_no"],
        kind=last["kind"] if last["state"] == "completed" else "failed",
        outcome=(last["output"] or {}).get("outcome", ""),
        rounds=rounds,
        tool_choice=options.get("tool_choice", "auto"),
        max_tool_rounds=options.get("max_tool_rounds", 0),
    )


async def _insert(
    connection: asyncpg.Connection,
    owner: Owner,
    tenant_id: str,
    step_no: int,
    kind: str,
    message_id: str | None,
) -> asyncpg.Record:
    parent = await connection.fetchrow(
        "SELECT step_no, token_start + token_count AS at FROM steps"
        " WHERE session_id = $1 AND state = 'completed' AND step_no < $2 ORDER BY step_no DESC LIMIT 1",
        owner.session_id,
        step_no,
    )
    return await connection.fetchrow(
        "INSERT INTO steps (session_id, step_no, tenant_id, parent_no, kind, state, token_start, message_id)"
        " VALUES ($1, $2, $3, $4, $5, 'running', $6, $7) RETURNING *",
        owner.session_id,
        step_no,
        tenant_id,
        parent["step_no"] if parent else None,
        kind,
        parent["at"] if parent else 0,
        message_id,
    )


async def _open_attempt(
    connection: asyncpg.Connection,
    owner: Owner,
    tenant_id: str,
    step: asyncpg.Record,
    token: str,
    durable: Sequence[Segment],
) -> tuple[int, bool]:
    key = (owner.session_id, step["step_no"])
    known = await connection.fetchval(
        "SELECT attempt_no FROM attempts WHERE session_id = $1 AND step_no = $2 AND token = $3", *key, token
    )
    if known is not None:
        return known, False
    await connection.execute(
        "UPDATE attempts SET outcome = 'lost', ended_at = now()"
        " WHERE session_id = $1 AND step_no = $2 AND outcome = 'running'",
        *key,
    )
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
        sum(len(s.token_ids) for s in durable if s.kind == "model"),
    )
    return attempt_no, True


async def _close_attempt(
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
    first = await connection.fetchval(
        "SELECT coalesce(max(idx) + 1, 0) FROM segments WHERE session_id = $1 AND step_no = $2",
        session_id,
        step_no,
    )
    await connection.executemany(
        "INSERT INTO segments (session_id, step_no, idx, tenant_id, kind, token_ids) VALUES ($1, $2, $3, $4, $5, $6)",
        [
            (session_id, step_no, first + i, tenant_id, segment.kind, list(segment.token_ids))
            for i, segment in enumerate(segments)
            if segment.token_ids
        ],
    )


async def _insert_checkpoint(connection: asyncpg.Connection, attempt: Attempt, checkpoint: Checkpoint) -> None:
    settled = await connection.fetchval(
        "SELECT count(*) FROM tool_calls WHERE session_id = $1 AND status = 'settled'",
        attempt.session.session_id,
    )
    await connection.execute(
        "INSERT INTO checkpoints (session_id, step_no, tenant_id, token_count, token_digest, seed, sampler_pos,"
        " fingerprint, kv_group, kv_shard, kv_shards, kv_tail, kv_new, ledger_pos, workspace_root)"
        " VALUES ($1, $2, $3, $4, $5, $6, $4, $7, $8, $9, $10, $11, $12, $13, $14)",
        attempt.session.session_id,
        attempt.step_no,
        attempt.session.tenant_id,
        checkpoint.token_count,
        checkpoint.token_digest,
        attempt.session.seed,
        checkpoint.fingerprint,
        checkpoint.kv_group,
        checkpoint.kv_shard,
        checkpoint.kv_shards,
        checkpoint.kv_tail,
        list(checkpoint.kv_new),
        settled,
        checkpoint.workspace_root,
    )
