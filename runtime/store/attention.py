"""What needs a person now, and how long steps take: of every tenant, for an operator."""

from __future__ import annotations

from typing import Any, Final

from runtime.store.database import Database

NEWEST: Final = 2000  # steps of which latencies are told
SHOWN: Final = 20  # sessions of each kind
TRIES: Final = 3  # attempts at one step that are no accident any more

_STUCK: Final = """
SELECT session_id, tenant_id, state, node_id, updated_at, NULL AS about FROM sessions
WHERE state IN ('provisioning', 'thinking', 'tool_running', 'cancelling')
    AND updated_at < now() - make_interval(secs => $1) AND state NOT IN ('cancelled', 'completed')
ORDER BY updated_at LIMIT $2
"""
_FAILED: Final = """
SELECT session_id, tenant_id, state, node_id, updated_at, error ->> 'message' AS about FROM sessions
WHERE state = 'failed' ORDER BY updated_at DESC LIMIT $1
"""
_RETRYING: Final = """
SELECT s.session_id, s.tenant_id, s.state, s.node_id, s.updated_at,
    'step ' || t.step_no || ' is at its attempt ' || t.attempts AS about
FROM steps t JOIN sessions s USING (session_id)
WHERE t.state = 'running' AND t.attempts >= $1 ORDER BY t.attempts DESC, s.session_id LIMIT $2
"""
_LATENCIES: Final = """
SELECT kind, count(*) AS steps, percentile_cont(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY took) AS quantiles
FROM (SELECT kind, extract(epoch FROM ended_at - started_at)::float8 AS took FROM steps
    WHERE ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT $1) newest
GROUP BY kind ORDER BY kind
"""
_QUESTIONS: Final = """
SELECT * FROM questions WHERE state = 'open'
    AND ($1::text IS NULL OR kind = $1) AND ($2::text IS NULL OR tenant_id = $2)
    AND ($3::text IS NULL OR (created_at, question_id) >
        (SELECT created_at, question_id FROM questions WHERE question_id = $3))
ORDER BY created_at, question_id LIMIT $4
"""


_DENIED: Final = """
SELECT session_id, tenant_id, created_at, data FROM events WHERE type = 'sandbox.egress_denied'
ORDER BY created_at DESC LIMIT $1
"""


async def denied(db: Database) -> list[dict[str, Any]]:
    """What sandboxes wanted to reach of late and may not, the newest first."""
    return [dict(row) for row in await db.fetch(_DENIED, SHOWN)]


async def open_questions(
    db: Database, kind: str | None, tenant_id: str | None, after: str | None, limit: int
) -> list[dict[str, Any]]:
    """What sessions of any tenant wait for, oldest first."""
    return [dict(row) for row in await db.fetch(_QUESTIONS, kind, tenant_id, after, limit)]


async def asked(db: Database) -> dict[str, int]:
    """How many questions are open, by kind."""
    rows = await db.fetch("SELECT kind, count(*) AS found FROM questions WHERE state = 'open' GROUP BY kind")
    return {row["kind"]: row["found"] for row in rows}


async def stuck(db: Database, quiet_s: float) -> list[dict[str, Any]]:
    """Sessions that should be doing something, of which nothing was heard for `quiet_s` seconds."""
    return [dict(row) for row in await db.fetch(_STUCK, quiet_s, SHOWN)]


async def failed(db: Database) -> list[dict[str, Any]]:
    """Sessions that wait for somebody to retry or end them, the newest first."""
    return [dict(row) for row in await db.fetch(_FAILED, SHOWN)]


async def retrying(db: Database) -> list[dict[str, Any]]:
    """Sessions whose present step was begun again and again."""
    return [dict(row) for row in await db.fetch(_RETRYING, TRIES, SHOWN)]


async def latencies(db: Database) -> list[dict[str, Any]]:
    """Of the newest steps by kind, in seconds."""
    rows = await db.fetch(_LATENCIES, NEWEST)
    return [
        {"kind": row["kind"], "steps": row["steps"], **dict(zip(("p50", "p95", "p99"), row["quantiles"], strict=True))}
        for row in rows
    ]
