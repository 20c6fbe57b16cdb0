"""The record of a session as an archive has it: read in one transaction, so that all of it is of one moment."""

from __future__ import annotations

import base64
import datetime
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from runtime.store.database import Database

_STEPS = (
    "SELECT s.step_no, s.parent_no, s.kind, s.state, s.live, s.token_start, s.token_count, s.attempts, s.error,"
    " s.started_at, s.ended_at, CASE WHEN m.options IS NULL OR s.output IS NULL THEN s.output"
    " ELSE s.output || jsonb_build_object('options', m.options) END AS output"
    " FROM steps s LEFT JOIN messages m USING (message_id) WHERE s.session_id = $1 ORDER BY s.step_no"
)
_SEGMENTS = (
    "SELECT g.step_no, g.idx, g.kind, g.token_ids FROM segments g JOIN steps s USING (session_id, step_no)"
    " WHERE session_id = $1 AND s.live AND s.state = 'completed' ORDER BY step_no, idx"
)


@dataclass(frozen=True)
class Part:
    """A part of the record: a query, and how a row of it is shown."""

    name: str
    sql: str
    show: Callable[[Any], dict[str, Any]]


def _step(row: asyncpg.Record) -> dict[str, Any]:
    return {
        "step": row["step_no"],
        "parent": row["parent_no"],
        **{name: row[name] for name in ("kind", "state", "live", "token_start", "token_count", "attempts")},
        "output": row["output"],
        "error": row["error"],
        "started_at": row["started_at"].isoformat(),
        "ended_at": _time(row["ended_at"]),
    }


def _segment(row: asyncpg.Record) -> dict[str, Any]:
    return {"step": row["step_no"], "idx": row["idx"], "kind": row["kind"], "token_ids": row["token_ids"]}


def _call(row: asyncpg.Record) -> dict[str, Any]:
    output = None if row["output"] is None else base64.b64encode(row["output"]).decode()
    return {
        "step": row["step_no"],
        "call": row["call_no"],
        **{name: row[name] for name in ("name", "arguments", "effect", "status", "runs", "result")},
        "output": output,
    }


def _event(row: asyncpg.Record) -> dict[str, Any]:
    about = {"id": row["pos"], "type": row["type"], "step": row["step_no"], "attempt": row["attempt_no"]}
    return {**about, "data": row["data"], "created_at": row["created_at"].isoformat()}


def _checkpoint(row: asyncpg.Record) -> dict[str, Any]:
    return {
        "step": row["step_no"],
        "tokens": row["token_count"],
        "token_digest": row["token_digest"].hex(),
        **{name: row[name] for name in ("seed", "sampler_pos", "fingerprint", "ledger_pos", "workspace_root")},
    }


PARTS = (
    Part("transcript.jsonl", _SEGMENTS, _segment),
    Part("steps.jsonl", _STEPS, _step),
    Part("calls.jsonl", "SELECT * FROM tool_calls WHERE session_id = $1 ORDER BY step_no, call_no", _call),
    Part("events.jsonl", "SELECT * FROM events WHERE session_id = $1 ORDER BY pos", _event),
    Part(
        "checkpoints.jsonl",
        "SELECT c.* FROM checkpoints c JOIN steps s USING (session_id, step_no)"
        " WHERE session_id = $1 AND s.live ORDER BY step_no",
        _checkpoint,
    ),
)


async def read(
    db: Database, session_id: str, begin: Callable[[Mapping[str, Any]], None], take: Callable[[Part, Any], None]
) -> None:
    """Tell `begin` the session, with its tools' listings, and `take` each row of each part. Begun anew where the
    connection is lost."""

    async def work(connection: asyncpg.Connection) -> None:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row = await connection.fetchrow(
            "SELECT s.*, t.listings FROM sessions s LEFT JOIN session_tools t USING (session_id) WHERE session_id = $1",
            session_id,
        )
        begin(dict(row))
        for part in PARTS:
            async for one in _rows(connection, part, session_id):
                take(part, one)

    await db.run(work)


async def _rows(connection: asyncpg.Connection, part: Part, session_id: str) -> AsyncIterator[dict[str, Any]]:
    async for row in connection.cursor(part.sql, session_id, prefetch=500):
        yield part.show(row)


def _time(value: datetime.datetime | None) -> str | None:
    return value.isoformat() if value else None
