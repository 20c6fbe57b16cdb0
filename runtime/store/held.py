"""A session's row while it is written to: locked, and held at one epoch.

Two ways lead there. `locked` is a statement of its own: what the transaction reads after it was committed before.
HELD is part of a statement that does everything at once, in one round trip; such a statement reads as of its beginning,
so it holds nothing where somebody wrote between that and the lock, and its work is then done the first way.
"""

from __future__ import annotations

import asyncpg

from runtime.errors import StaleEpoch
from runtime.store.budgets import MEASURES
from runtime.store.values import Session

COLUMNS = (
    "s.session_id, s.tenant_id, s.state, s.waiting_for, s.config, s.seed, s.epoch, s.budget, s.warned,"
    " s.spent_tokens, s.spent_steps, s.tool_ms, s.busy_ms + CASE WHEN s.state IN ('provisioning', 'thinking',"
    " 'tool_running') THEN extract(epoch FROM clock_timestamp() - s.state_since) * 1000 ELSE 0 END AS busy_ms,"
    " coalesce(d.salt, t.salt) AS salt"
)
SOURCE = (
    "FROM sessions s JOIN tenants t USING (tenant_id) LEFT JOIN kv_domains d ON d.domain_id = s.kv_domain"
    " WHERE s.session_id = $1"
)
# $1 is the session, $2 the epoch. Every write of a session moves its next_pos on, under the lock of its row.
HELD = (
    f"held AS (SELECT {COLUMNS} {SOURCE} AND s.epoch = $2"
    " AND s.next_pos = (SELECT next_pos FROM sessions WHERE session_id = $1) AND ({condition}) FOR UPDATE OF s)"
)
WITHOUT_LIMITS = (
    "NOT EXISTS (SELECT FROM jsonb_each(coalesce(s.config -> 'budget', '{}') || coalesce(s.budget, '{}')) AS one"
    f" WHERE one.key IN ({', '.join(repr(measure) for measure in MEASURES)}) AND one.value <> 'null')"
)


async def locked(connection: asyncpg.Connection, session_id: str, epoch: int) -> Session:
    """The session's row, locked, if it is still held at `epoch`. Raises StaleEpoch."""
    session = await locked_at_any_epoch(connection, session_id)
    if session is None or session.epoch != epoch:
        raise StaleEpoch(f"session {session_id} is no longer held at epoch {epoch}")
    return session


async def locked_at_any_epoch(connection: asyncpg.Connection, session_id: str) -> Session | None:
    """The session's row, locked, for what only the workflow may do, of which there is one."""
    row = await connection.fetchrow(f"SELECT {COLUMNS} {SOURCE} FOR UPDATE OF s", session_id)
    return None if row is None else session_of(row)


def session_of(row: asyncpg.Record) -> Session:
    """Of a row with COLUMNS."""
    return Session(
        row["session_id"],
        row["tenant_id"],
        row["state"],
        row["config"],
        row["seed"],
        row["epoch"],
        row["salt"],
        row["waiting_for"],
        {**row["config"].get("budget", {}), **(row["budget"] or {})},
        {
            "tokens": row["spent_tokens"],
            "steps": row["spent_steps"],
            "tool_s": row["tool_ms"] / 1000,
            "wall_s": float(row["busy_ms"]) / 1000,
        },
        row["warned"],
    )
