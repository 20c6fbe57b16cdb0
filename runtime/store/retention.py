"""The record of a session outlives it for a while, and is then removed whole."""

from __future__ import annotations

import asyncpg

from runtime.store.database import Database

BATCH = 50
# Children before what they name.
_TABLES = (
    "events",
    "questions",
    "commands",
    "tool_calls",
    "checkpoints",
    "segments",
    "attempts",
    "steps",
    "messages",
    "kv_residency",
    "kv_decisions",
    "session_tools",
    "sandbox_turns",
    "sandboxes",
    "errands",
    "responses",
    "sessions",
)


async def sweep(db: Database, keep_days: float) -> int:
    """Remove the record of sessions that ended longer ago; returns how many. One at a time may do so."""
    swept = 0
    while True:
        some = await db.run(lambda c: _sweep_some(c, keep_days))
        swept += some
        if some < BATCH:
            return swept


async def _sweep_some(connection: asyncpg.Connection, keep_days: float) -> int:
    rows = await connection.fetch(
        "SELECT session_id FROM sessions WHERE state IN ('cancelled', 'completed')"
        " AND updated_at < now() - make_interval(secs => $1) ORDER BY updated_at LIMIT $2 FOR UPDATE SKIP LOCKED",
        keep_days * 86_400,
        BATCH,
    )
    ids = [row["session_id"] for row in rows]
    for table in _TABLES if ids else ():
        await connection.execute(f"DELETE FROM {table} WHERE session_id = ANY($1)", ids)
    await connection.execute(
        "DELETE FROM idempotency WHERE created_at < now() - make_interval(secs => $1)", keep_days * 86_400
    )
    await connection.execute(
        "DELETE FROM webhook_deliveries WHERE state <> 'pending' AND created_at < now() - make_interval(secs => $1)",
        keep_days * 86_400,
    )
    await connection.execute(
        "DELETE FROM schedule_runs WHERE created_at < now() - make_interval(secs => $1)", keep_days * 86_400
    )
    await connection.execute(
        "DELETE FROM schedules WHERE deleted_at < now() - make_interval(secs => $1) AND applied = revision",
        keep_days * 86_400,
    )
    return len(ids)
