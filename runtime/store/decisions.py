"""The decision log of the KV tiers, as engines tell it."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from runtime.store.database import Database

_COLUMNS = (
    "reason",
    "action",
    "place",
    "tokens",
    "bytes",
    "predicted_s",
    "realised_s",
    "instead_s",
    "status",
    "detail",
)
_TEXTS = ("reason", "action", "place", "status", "detail")


async def write(db: Database, engine_boot: str, entries: Sequence[Mapping[str, Any]]) -> int:
    """Keep entries of one engine; one that was told before is replaced. Those of sessions that the record does not
    know (somebody measures) are left out. Returns how many are kept."""
    rows = [
        (
            engine_boot,
            entry["seq"],
            _text(entry["session"]),
            entry["step"],
            datetime.datetime.fromtimestamp(entry["at_s"], datetime.UTC),
            *(_text(entry[name]) if name in _TEXTS else entry[name] for name in _COLUMNS),
        )
        for entry in entries
    ]

    async def work(connection: asyncpg.Connection) -> int:
        columns = ", ".join(_COLUMNS)
        values = ", ".join(f"${n}" for n in range(6, 6 + len(_COLUMNS)))
        done = await connection.prepare(
            f"INSERT INTO kv_decisions (engine_boot, seq, tenant_id, session_id, step_no, decided_at, {columns})"
            f" SELECT $1, $2, tenant_id, session_id, $4, $5, {values} FROM sessions WHERE session_id = $3"
            " ON CONFLICT (engine_boot, seq) DO UPDATE SET realised_s = excluded.realised_s,"
            " status = excluded.status, detail = excluded.detail RETURNING 1"
        )
        return sum([len(await done.fetch(*row)) for row in rows])

    return await db.run(work) if rows else 0


async def of_session(
    db: Database, session_id: str, *, limit: int = 1000, after: tuple[str, int] | None = None
) -> list[dict[str, Any]]:
    """In the order in which they were made. `after`: the engine's boot and the number of the last one seen."""
    boot, seq = after or ("", 0)
    rows = await db.fetch(
        "SELECT engine_boot, seq, step_no, decided_at, reason, action, place, tokens, bytes, predicted_s, realised_s,"
        " instead_s, status, detail FROM kv_decisions WHERE session_id = $1 AND ($3 = '' OR (decided_at, seq) >"
        " (SELECT decided_at, seq FROM kv_decisions WHERE engine_boot = $3 AND seq = $4))"
        " ORDER BY decided_at, seq LIMIT $2",
        session_id,
        limit,
        boot,
        seq,
    )
    return [dict(row) for row in rows]


def _text(text: str) -> str:
    """As Postgres can hold it: an engine takes any name of a session, and one entry must not stop all later ones."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")
