"""What a session's tool servers offer, as it was said the first time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from runtime.store import events
from runtime.store.database import Database
from runtime.store.held import locked
from runtime.store.values import Event, Owner


async def of(db: Database, session_id: str) -> Mapping[str, Any] | None:
    row = await db.fetchrow("SELECT listings FROM session_tools WHERE session_id = $1", session_id)
    return None if row is None else dict(row["listings"])


async def keep(
    db: Database, owner: Owner, step_no: int, listings: Mapping[str, Any], told: Sequence[Event]
) -> Mapping[str, Any]:
    """Write it down, unless somebody has; returns what stands there. Raises StaleEpoch."""

    async def work(connection: asyncpg.Connection) -> Mapping[str, Any]:
        session = await locked(connection, owner.session_id, owner.epoch)
        made = await connection.fetchval(
            "INSERT INTO session_tools (session_id, tenant_id, listings) VALUES ($1, $2, $3)"
            " ON CONFLICT DO NOTHING RETURNING true",
            owner.session_id,
            session.tenant_id,
            dict(listings),
        )
        if made:
            await events.append(connection, owner.session_id, told, step_no=step_no)
        row = await connection.fetchrow("SELECT listings FROM session_tools WHERE session_id = $1", owner.session_id)
        return dict(row["listings"])

    return await db.run(work)
