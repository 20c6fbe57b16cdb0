"""Errands: what somebody asks of a node beside the steps of a session, and what came of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from runtime.store.database import Database
from runtime.store.fleet import NODE_ALIVE_S

KEPT_S: Final = 86_400.0  # for whoever asks again with the same key


@dataclass(frozen=True)
class Errand:
    """`state`: asked, done or refused; `result`: what came of it, or why it was refused."""

    errand_id: str
    tenant_id: str
    session_id: str | None
    kind: str
    request: Mapping[str, Any]
    state: str
    result: Mapping[str, Any] | None
    body: bytes | None


async def ask(
    db: Database, tenant_id: str, errand_id: str, kind: str, request: Mapping[str, Any], session_id: str | None
) -> None:
    """Repeated with the same id: a no-op."""
    await db.execute(
        "INSERT INTO errands (errand_id, tenant_id, session_id, kind, request) VALUES ($1, $2, $3, $4, $5)"
        " ON CONFLICT DO NOTHING",
        errand_id,
        tenant_id,
        session_id,
        kind,
        dict(request),
    )


async def get(db: Database, errand_id: str) -> Errand | None:
    row = await db.fetchrow(
        "SELECT errand_id, tenant_id, session_id, kind, request, state, result, body FROM errands WHERE errand_id = $1",
        errand_id,
    )
    return Errand(**dict(row)) if row else None


async def end(db: Database, errand_id: str, state: str, result: Mapping[str, Any], body: bytes | None = None) -> None:
    """Once: a second end changes nothing. What came with it is not needed any more."""

    async def work(connection: asyncpg.Connection) -> None:
        await connection.execute(
            "UPDATE errands SET state = $2, result = $3, body = $4, done_at = now()"
            " WHERE errand_id = $1 AND state = 'asked'",
            errand_id,
            state,
            dict(result),
            body,
        )
        await connection.execute("DELETE FROM errand_parts WHERE errand_id = $1", errand_id)

    await db.run(work)


async def forget(db: Database, errand_id: str) -> None:
    await db.execute("DELETE FROM errands WHERE errand_id = $1", errand_id)
    await drop_parts(db, errand_id)


async def drop_parts(db: Database, errand_id: str) -> None:
    await db.execute("DELETE FROM errand_parts WHERE errand_id = $1", errand_id)


async def add_part(db: Database, tenant_id: str, errand_id: str, part_no: int, body: bytes) -> None:
    """A piece of what is too large for one row. Repeated: a no-op."""
    await db.execute(
        "INSERT INTO errand_parts (errand_id, part_no, tenant_id, body) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
        errand_id,
        part_no,
        tenant_id,
        body,
    )


async def parts(db: Database, errand_id: str) -> AsyncIterator[bytes]:
    part_no = 0
    while True:
        row = await db.fetchrow(
            "SELECT body FROM errand_parts WHERE errand_id = $1 AND part_no = $2", errand_id, part_no
        )
        if row is None:
            return
        yield row["body"]
        part_no += 1


async def queues(db: Database, node_id: str | None, *, model: str | None = None) -> list[str]:
    """Of living nodes (that serve a model), that of `node_id` first."""
    rows = await db.fetch(
        "SELECT queue FROM nodes WHERE heartbeat_at > now() - make_interval(secs => $2)"
        " AND ($3::text IS NULL OR card ->> 'model' = $3) ORDER BY node_id IS DISTINCT FROM $1, draining, node_id",
        node_id,
        NODE_ALIVE_S,
        model,
    )
    return [row["queue"] for row in rows]


async def sweep(db: Database) -> None:
    """Remove what nobody will ask about any more."""
    for table in ("errands", "errand_parts"):
        await db.execute(f"DELETE FROM {table} WHERE created_at < now() - make_interval(secs => $1)", KEPT_S)
