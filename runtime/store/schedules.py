"""Schedules as their owner sees them, what Temporal is still to be told of them, and the runs that they began."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from runtime.errors import NotFound
from runtime.store.database import Database


@dataclass(frozen=True)
class Plan:
    """What is to be started, and when."""

    description: str
    agent: str
    version: int | None
    message: Mapping[str, Any]
    metadata: Mapping[str, str]
    timing: Mapping[str, Any]
    complete_when_idle: bool

    def columns(self) -> tuple[Any, ...]:
        said = (self.description, self.agent, self.version, dict(self.message), dict(self.metadata))
        return (*said, dict(self.timing), self.complete_when_idle)


async def create(db: Database, tenant_id: str, schedule_id: str, plan: Plan, *, paused: bool) -> None:
    """Repeated with the same id: a no-op."""
    await db.execute(
        "INSERT INTO schedules (schedule_id, tenant_id, description, agent_name, agent_version, message, metadata,"
        " timing, complete_when_idle, paused_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9,"
        " CASE WHEN $10 THEN now() END) ON CONFLICT DO NOTHING",
        schedule_id,
        tenant_id,
        *plan.columns(),
        paused,
    )


async def exists(db: Database, schedule_id: str) -> bool:
    return await db.fetchrow("SELECT 1 FROM schedules WHERE schedule_id = $1", schedule_id) is not None


async def get(db: Database, tenant_id: str, schedule_id: str) -> asyncpg.Record:
    """Raises NotFound."""
    row = await db.fetchrow(
        "SELECT * FROM schedules WHERE tenant_id = $1 AND schedule_id = $2 AND deleted_at IS NULL",
        tenant_id,
        schedule_id,
    )
    if row is None:
        raise NotFound(f"there is no schedule {schedule_id}")
    return row


async def listed(db: Database, tenant_id: str, limit: int, after: str | None) -> list[asyncpg.Record]:
    """By id; one more than `limit` if there are more."""
    return await db.fetch(
        "SELECT * FROM schedules WHERE tenant_id = $1 AND deleted_at IS NULL"
        " AND ($2::text IS NULL OR schedule_id > $2) ORDER BY schedule_id LIMIT $3",
        tenant_id,
        after,
        limit + 1,
    )


async def change(db: Database, tenant_id: str, schedule_id: str, plan: Plan, revision: int) -> bool:
    """False: it is not as it was at that revision any more."""
    row = await db.fetchrow(
        "UPDATE schedules SET description = $3, agent_name = $4, agent_version = $5, message = $6, metadata = $7,"
        " timing = $8, complete_when_idle = $9, revision = revision + 1, updated_at = now()"
        " WHERE tenant_id = $1 AND schedule_id = $2 AND deleted_at IS NULL AND revision = $10 RETURNING schedule_id",
        tenant_id,
        schedule_id,
        *plan.columns(),
        revision,
    )
    return row is not None


async def pause(db: Database, tenant_id: str, schedule_id: str, paused: bool) -> None:
    """Idempotent. Raises NotFound."""
    await _revise(db, tenant_id, schedule_id, "paused_at = CASE WHEN $3 THEN coalesce(paused_at, now()) END", paused)


async def delete(db: Database, tenant_id: str, schedule_id: str) -> None:
    """It fires no more; the sessions that it made stay. Raises NotFound."""
    await _revise(db, tenant_id, schedule_id, "deleted_at = now()")


async def _revise(db: Database, tenant_id: str, schedule_id: str, what: str, *values: Any) -> None:
    row = await db.fetchrow(
        f"UPDATE schedules SET {what}, revision = revision + 1, updated_at = now()"
        " WHERE tenant_id = $1 AND schedule_id = $2 AND deleted_at IS NULL RETURNING schedule_id",
        tenant_id,
        schedule_id,
        *values,
    )
    if row is None:
        raise NotFound(f"there is no schedule {schedule_id}")


# --- what Temporal is to have ------------------------------------------------------------------------------------


async def to_apply(db: Database) -> list[str]:
    return [row["schedule_id"] for row in await db.fetch("SELECT schedule_id FROM schedules WHERE applied < revision")]


async def living(db: Database) -> set[str]:
    """Those that Temporal has been given, and is to have still."""
    rows = await db.fetch("SELECT schedule_id FROM schedules WHERE deleted_at IS NULL AND applied > 0")
    return {row["schedule_id"] for row in rows}


async def apply(
    db: Database, schedule_id: str, tell: Callable[[asyncpg.Record], Awaitable[None]], *, again: bool = False
) -> None:
    """Tell Temporal what the row says, under its lock: of two that do so the later one has the later row. `again`: as
    well where it was told before."""

    async def work(connection: asyncpg.Connection) -> None:
        row = await connection.fetchrow(
            "SELECT * FROM schedules WHERE schedule_id = $1 AND (applied < revision OR $2) FOR UPDATE SKIP LOCKED",
            schedule_id,
            again,
        )
        if row is not None:
            await tell(row)
            await connection.execute("UPDATE schedules SET applied = revision WHERE schedule_id = $1", schedule_id)

    await db.run(work)


# --- runs --------------------------------------------------------------------------------------------------------


async def to_fire(db: Database, schedule_id: str) -> asyncpg.Record | None:
    """None where it was deleted."""
    return await db.fetchrow("SELECT * FROM schedules WHERE schedule_id = $1 AND deleted_at IS NULL", schedule_id)


async def note_run(
    db: Database, schedule: asyncpg.Record, firing: str, session_id: str | None, error: str | None
) -> None:
    """Repeated: a no-op."""
    await db.execute(
        "INSERT INTO schedule_runs (schedule_id, firing, tenant_id, session_id, error) VALUES ($1, $2, $3, $4, $5)"
        " ON CONFLICT DO NOTHING",
        schedule["schedule_id"],
        firing,
        schedule["tenant_id"],
        session_id,
        error,
    )


async def runs(db: Database, schedule_id: str, limit: int, after: str | None) -> list[asyncpg.Record]:
    """Newest first, with the states of their sessions; one more than `limit` if there are more."""
    return await db.fetch(
        "SELECT r.*, s.state FROM schedule_runs r LEFT JOIN sessions s USING (session_id) WHERE r.schedule_id = $1"
        " AND ($2::text IS NULL OR (r.created_at, r.firing) <"
        "  (SELECT created_at, firing FROM schedule_runs WHERE schedule_id = $1 AND firing = $2))"
        " ORDER BY r.created_at DESC, r.firing DESC LIMIT $3",
        schedule_id,
        after,
        limit + 1,
    )
