"""The event log of a session: one order, allocated under the session's row lock, committed rows only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from runtime.errors import StaleEpoch
from runtime.store.database import Database
from runtime.store.values import Event

CHANNEL = "tenuto_events"

_APPEND = """
WITH place AS (
    UPDATE sessions SET next_pos = next_pos + $2, updated_at = now()
    WHERE session_id = $1 AND ($3::bigint IS NULL OR epoch = $3) RETURNING next_pos, tenant_id
), written AS (
    INSERT INTO events (session_id, pos, tenant_id, type, step_no, attempt_no, data)
    SELECT $1, place.next_pos - $2 + nth - 1, place.tenant_id, one.type, $4, $5, one.data
    FROM place, unnest($6::text[], $7::jsonb[]) WITH ORDINALITY AS one (type, data, nth)
)
SELECT next_pos, pg_notify($8, $1) FROM place
"""


async def append(
    connection: asyncpg.Connection,
    session_id: str,
    events: Sequence[Event],
    *,
    epoch: int | None = None,
    step_no: int | None = None,
    attempt_no: int | None = None,
) -> int:
    """Write `events` and return the position after the last one. With an epoch the write is fenced (StaleEpoch)."""
    row = await connection.fetchrow(
        _APPEND,
        session_id,
        len(events),
        epoch,
        step_no,
        attempt_no,
        [event.type for event in events],
        [dict(event.data) for event in events],
        CHANNEL,
    )
    if row is None:
        raise StaleEpoch(f"session {session_id} is no longer held at epoch {epoch}")
    return int(row["next_pos"])


async def write(db: Database, session_id: str, events: Sequence[Event], *, epoch: int, step_no: int) -> None:
    """Events that only inform (KV moves, sandbox life): after a lost connection one may stand twice."""
    await db.run(lambda c: append(c, session_id, events, epoch=epoch, step_no=step_no))


async def read(db: Database, session_id: str, after: int, limit: int) -> list[dict[str, Any]]:
    rows = await db.fetch(
        "SELECT pos, type, step_no, attempt_no, data, created_at FROM events"
        " WHERE session_id = $1 AND pos > $2 ORDER BY pos LIMIT $3",
        session_id,
        after,
        limit,
    )
    return [as_json(row) for row in rows]


def as_json(row: asyncpg.Record) -> dict[str, Any]:
    body = {
        "id": row["pos"],
        "type": row["type"],
        "created_at": row["created_at"].isoformat(),
        "data": row["data"],
    }
    if row["step_no"] is not None:
        body["step"] = row["step_no"]
    if row["attempt_no"] is not None:
        body["attempt"] = row["attempt_no"]
    return body


@dataclass(frozen=True)
class Told:
    """An event as it goes over the wire: `text` is its JSON, which nobody has read on the way."""

    position: int
    type: str
    text: str


_NEXT = """
SELECT f.session_id, e.* FROM unnest($1::text[], $2::bigint[]) AS f (session_id, place)
CROSS JOIN LATERAL (
    SELECT pos, type, step_no, attempt_no, data::text AS data, created_at FROM events
    WHERE session_id = f.session_id AND pos > f.place ORDER BY pos LIMIT $3
) e ORDER BY f.session_id, e.pos
"""


async def told(db: Database, places: Mapping[str, int], limit: int) -> dict[str, list[Told]]:
    """What comes after a position, of each session, oldest first: `limit` at most of each."""
    found: dict[str, list[Told]] = {session_id: [] for session_id in places}
    for row in await db.fetch(_NEXT, list(places), list(places.values()), limit):
        step = "" if row["step_no"] is None else f', "step": {row["step_no"]}'
        attempt = "" if row["attempt_no"] is None else f', "attempt": {row["attempt_no"]}'
        text = (
            f'{{"id": {row["pos"]}, "type": "{row["type"]}", "created_at": "{row["created_at"].isoformat()}",'
            f' "data": {row["data"]}{step}{attempt}}}'
        )
        found[row["session_id"]].append(Told(row["pos"], row["type"], text))
    return found
