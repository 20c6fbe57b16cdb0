"""What a tenant may use, looked at where it is about to use more: under a lock where two could pass at once."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from runtime.errors import Forbidden, TooManyRequests
from runtime.store.database import Database

WAITS_S: Final = 15  # whoever waits for a sandbox and has said nothing for so long has gone
_OPEN: Final = "state NOT IN ('cancelled', 'completed')"
_TODAY: Final = "date_trunc('day', now(), 'UTC')"


@dataclass(frozen=True)
class Used:
    """What a tenant uses now, by the names of its quotas."""

    open_sessions: int
    tokens_per_day: int
    disk_bytes: int
    sandboxes: int


async def used(db: Database, tenant_id: str) -> Used:
    row = await db.fetchrow(
        f"SELECT (SELECT count(*) FROM sessions WHERE tenant_id = $1 AND {_OPEN}) AS open_sessions,"
        f" {_tokens('$1')} AS tokens_per_day,"
        " (SELECT coalesce(sum((config -> 'limits' ->> 'workspace_bytes')::bigint), 0)::bigint FROM sessions"
        f" WHERE tenant_id = $1 AND {_OPEN}) AS disk_bytes,"
        " (SELECT count(*) FROM sandboxes WHERE tenant_id = $1 AND state <> 'released') AS sandboxes",
        tenant_id,
    )
    assert row is not None
    return Used(**row)


def _tokens(tenant: str) -> str:
    """Sampled and prefilled today (UTC), of steps that have settled."""
    return (
        "(SELECT coalesce(sum(sampled + coalesce(recomputed, 0) + coalesce(computed, 0)), 0)::bigint FROM usage"
        f" WHERE tenant_id = {tenant} AND settled_at >= {_TODAY})"
    )


async def ensure_room_for_session(
    connection: asyncpg.Connection, tenant_id: str, session_id: str, config: Mapping[str, Any]
) -> None:
    """Before the session is inserted, in the same transaction. Raises Forbidden (quota_exceeded)."""
    of_tenant = await _quotas(connection, tenant_id, "open_sessions", "disk_bytes")
    if of_tenant is None:
        return
    row = await connection.fetchrow(
        "SELECT count(*) AS sessions, coalesce(sum((config -> 'limits' ->> 'workspace_bytes')::bigint), 0)::bigint"
        f" AS bytes FROM sessions WHERE tenant_id = $1 AND session_id <> $2 AND {_OPEN}",
        tenant_id,
        session_id,
    )
    workspace_bytes = int(config.get("limits", {}).get("workspace_bytes", 0))
    sessions, disk_bytes = of_tenant
    if sessions is not None and row["sessions"] + 1 > sessions:
        raise _exceeded("open_sessions", f"{row['sessions']} of {sessions} sessions are open", "end some")
    if disk_bytes is not None and row["bytes"] + workspace_bytes > disk_bytes:
        raise _exceeded(
            "disk_bytes",
            f"workspaces of open sessions have {row['bytes']} of {disk_bytes} bytes, and this one {workspace_bytes}",
            "end some sessions, ask for less limits.workspace_bytes",
        )


def _exceeded(quota: str, how: str, help_: str) -> Forbidden:
    return Forbidden(
        f"the tenant's quota {quota} is used up: {how}; {help_}, or ask the operator for more",
        param=quota,
        code="quota_exceeded",
    )


async def ensure_tokens(connection: asyncpg.Connection | Database, tenant_id: str) -> None:
    """Before a message is accepted. What runs already goes on. Raises TooManyRequests (quota_exceeded)."""
    row = await connection.fetchrow("SELECT tokens_per_day FROM tenants WHERE tenant_id = $1", tenant_id)
    limit = row["tokens_per_day"] if row else None
    if limit is None:
        return
    row = await connection.fetchrow(
        f"SELECT {_tokens('$1')} AS used, {_TODAY} + interval '1 day' AS midnight,"
        f" ceil(extract(epoch FROM {_TODAY} + interval '1 day' - now()))::int AS left_s",
        tenant_id,
    )
    assert row is not None
    if row["used"] >= limit:
        at: datetime.datetime = row["midnight"]
        raise TooManyRequests(
            f"the tenant's quota tokens_per_day is used up: {row['used']} of {limit} tokens were sampled or prefilled"
            f" today; send the message after {at.isoformat(timespec='minutes')}, or ask the operator for more",
            max(1, row["left_s"]),
            code="quota_exceeded",
        )


@dataclass(frozen=True)
class Turn:
    """Whether a session's sandbox may be made now; `used`: how many there are or come before it."""

    may: bool
    used: int
    limit: int | None


async def turn_for_sandbox(db: Database, tenant_id: str, session_id: str) -> Turn:
    """Ask for a place among the tenant's sandboxes, and keep one's place in the queue: first come, first served.

    The place is held until `sandboxes.open_one` takes it, or `leave_queue` gives it up."""

    async def work(connection: asyncpg.Connection) -> Turn:
        of_tenant = await _quotas(connection, tenant_id, "sandboxes")
        if of_tenant is None:
            return Turn(True, 0, None)
        seq = await connection.fetchval(
            "INSERT INTO sandbox_turns (session_id, tenant_id) VALUES ($1, $2)"
            " ON CONFLICT (session_id) DO UPDATE SET renewed_at = now() RETURNING seq",
            session_id,
            tenant_id,
        )
        used = await connection.fetchval(
            "SELECT (SELECT count(*) FROM sandboxes WHERE tenant_id = $1 AND state <> 'released' AND session_id <> $2)"
            " + (SELECT count(*) FROM sandbox_turns WHERE tenant_id = $1 AND seq < $3"
            "    AND renewed_at > now() - make_interval(secs => $4))",
            tenant_id,
            session_id,
            seq,
            WAITS_S,
        )
        limit = of_tenant[0]
        return Turn(limit is None or used < limit, used, limit)

    return await db.run(work)


async def leave_queue(db: Database, session_id: str) -> None:
    await db.execute("DELETE FROM sandbox_turns WHERE session_id = $1", session_id)


async def _quotas(connection: asyncpg.Connection, tenant_id: str, *names: str) -> list[int | None] | None:
    """Their values, with the tenant's row locked against others who ask; None, and no lock, where none is set."""
    sql = f"SELECT {', '.join(names)} FROM tenants WHERE tenant_id = $1"
    row = await connection.fetchrow(sql, tenant_id)
    if row is None or all(value is None for value in row):
        return None
    return list(await connection.fetchrow(f"{sql} FOR NO KEY UPDATE", tenant_id))
