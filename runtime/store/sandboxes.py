"""Sandboxes: whose each is, which are spares, and which nobody uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.store.database import Database
from runtime.store.fleet import NODE_ALIVE_S
from runtime.store.quotas import WAITS_S

# Of the session of `b`: when a command that was run from outside ended last, and whether one is to run.
_EXECS = (
    "SELECT max(done_at) AS ended_at, bool_or(state = 'accepted') AS pending FROM commands"
    " WHERE session_id = b.session_id AND verb = 'exec'"
)


async def open_one(db: Database, tenant_id: str, session_id: str, sandbox_id: str, node_id: str, driver: str) -> None:
    """Announce a session's sandbox before it exists, so that the reaper knows it from its first moment; or one that was
    a spare, and is none any more."""
    await db.execute(
        "WITH taken AS (DELETE FROM sandbox_spares WHERE sandbox_id = $1),"
        " waited AS (DELETE FROM sandbox_turns WHERE session_id = $3)"
        " INSERT INTO sandboxes (sandbox_id, tenant_id, session_id, node_id, driver, state)"
        " VALUES ($1, $2, $3, $4, $5, 'creating') ON CONFLICT DO NOTHING",
        sandbox_id,
        tenant_id,
        session_id,
        node_id,
        driver,
    )


async def workspaces(db: Database, node_id: str) -> dict[str, int]:
    """How many sandboxes of sessions a node has, and how many bytes their workspaces may take, which are in memory."""
    row = await db.fetchrow(
        "SELECT count(*) AS sandboxes,"
        " coalesce(sum((s.config -> 'limits' ->> 'workspace_bytes')::bigint), 0)::bigint AS bytes"
        " FROM sandboxes b JOIN sessions s USING (session_id) WHERE b.node_id = $1 AND b.state <> 'released'",
        node_id,
    )
    assert row is not None
    return dict(row)


async def announce_spare(db: Database, sandbox_id: str, node_id: str, boot: str) -> None:
    """A sandbox that a node will keep ready, before it exists."""
    await db.execute(
        "INSERT INTO sandbox_spares (sandbox_id, node_id, boot) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
        sandbox_id,
        node_id,
        boot,
    )


async def withdraw_spare(db: Database, sandbox_id: str) -> None:
    await db.execute("DELETE FROM sandbox_spares WHERE sandbox_id = $1", sandbox_id)


async def forget_spares(db: Database, node_id: str, boot: str) -> None:
    """Of lives of nodes that are over, for good or for another life: this node's own, and those long silent."""
    await db.execute(
        "DELETE FROM sandbox_spares p WHERE (node_id = $1 AND boot <> $2) OR (node_id <> $1 AND NOT EXISTS"
        " (SELECT FROM nodes n WHERE n.node_id = p.node_id AND n.boot = p.boot"
        "  AND n.heartbeat_at > now() - make_interval(secs => $3)))",
        node_id,
        boot,
        NODE_ALIVE_S,
    )


async def idle(db: Database, node_id: str, idle_s: float) -> list[dict[str, Any]]:
    """Of open sessions of a node, where no call runs or has ended within `idle_s`: their handles and idle times. Where
    another session of the tenant waits for its turn, those that are idle at all."""
    rows = await db.fetch(
        "SELECT b.session_id, b.sandbox_id, b.handle, s.epoch, extract(epoch FROM now() - u.used_at)::float8 AS idle_s"
        " FROM sandboxes b JOIN sessions s USING (session_id), LATERAL"
        " (SELECT greatest(b.created_at, max(c.started_at), max(c.settled_at), x.ended_at) AS used_at,"
        "   coalesce(bool_or(c.status = 'pending'), false) OR coalesce(x.pending, false) AS pending"
        f"  FROM ({_EXECS}) x LEFT JOIN tool_calls c ON c.session_id = b.session_id"
        "  GROUP BY x.ended_at, x.pending) u"
        " WHERE b.node_id = $1 AND b.state = 'live' AND s.state <> 'tool_running' AND NOT u.pending"
        " AND (u.used_at < now() - make_interval(secs => $2) OR EXISTS (SELECT FROM sandbox_turns t"
        "  WHERE t.tenant_id = b.tenant_id AND t.renewed_at > now() - make_interval(secs => $3)))",
        node_id,
        idle_s,
        WAITS_S,
    )
    return [{**row, "handle": dict(row["handle"])} for row in rows]


async def has_pending(db: Database, session_id: str, sandbox_id: str) -> bool:
    """Whether a call began in a sandbox whose end the record does not have."""
    row = await db.fetchrow(
        "SELECT FROM tool_calls WHERE session_id = $1 AND sandbox_id = $2 AND status = 'pending' LIMIT 1",
        session_id,
        sandbox_id,
    )
    return row is not None


async def keep(db: Database, sandbox_id: str, handle: Mapping[str, Any]) -> None:
    await db.execute(
        "UPDATE sandboxes SET state = 'live', handle = $2 WHERE sandbox_id = $1 AND state = 'creating'",
        sandbox_id,
        dict(handle),
    )


async def of_session(db: Database, session_id: str) -> dict[str, Any] | None:
    row = await db.fetchrow("SELECT * FROM sandboxes WHERE session_id = $1 AND state <> 'released'", session_id)
    return dict(row) if row else None


async def close(db: Database, sandbox_id: str) -> None:
    await db.execute(
        "UPDATE sandboxes SET state = 'released', released_at = now() WHERE sandbox_id = $1 AND state <> 'released'",
        sandbox_id,
    )


async def give_up(
    db: Database, session_id: str, epoch: int, base_root: str | None = None, left_root: str | None = None
) -> dict[str, Any] | None:
    """The handle of a sandbox that is released herewith; None where a step may be using it, or somebody else has the
    session by now. A step that begins at this moment waits, and finds it released. `left_root`: its workspace, where
    that is no more what the last step left, `base_root`."""
    row = await db.fetchrow(
        "WITH idle AS MATERIALIZED (SELECT session_id FROM sessions"
        "  WHERE session_id = $1 AND epoch = $2 AND state <> 'tool_running' FOR UPDATE)"
        " UPDATE sandboxes b SET state = 'released', released_at = now(), base_root = $3, left_root = $4 FROM idle"
        " WHERE b.session_id = idle.session_id AND b.state = 'live' AND NOT EXISTS"
        " (SELECT FROM tool_calls WHERE session_id = $1 AND status = 'pending') AND NOT EXISTS (SELECT FROM commands"
        "  WHERE session_id = $1 AND verb = 'exec' AND state = 'accepted') RETURNING b.handle",
        session_id,
        epoch,
        base_root,
        left_root,
    )
    return dict(row["handle"]) if row else None


async def left(db: Database, session_id: str, root: str) -> str:
    """The workspace that goes on from `root`: what the session's last sandbox left of it, or `root` itself."""
    row = await db.fetchrow(
        "SELECT base_root, left_root FROM sandboxes WHERE session_id = $1 AND state = 'released'"
        " ORDER BY created_at DESC LIMIT 1",
        session_id,
    )
    return row["left_root"] if row and row["left_root"] and row["base_root"] == root else root


async def move(db: Database, sandbox_id: str, node_id: str) -> None:
    """It stays where it is; another node of that machine has its session now."""
    await db.execute("UPDATE sandboxes SET node_id = $2 WHERE sandbox_id = $1", sandbox_id, node_id)


async def live(db: Database) -> set[str]:
    """Of every node: several of them may share a machine, and each sees all sandboxes that run there."""
    rows = await db.fetch(
        "SELECT sandbox_id FROM sandboxes WHERE state <> 'released' UNION SELECT sandbox_id FROM sandbox_spares"
    )
    return {row["sandbox_id"] for row in rows}


async def all_live(db: Database, node_id: str | None, limit: int, after: str | None) -> list[dict[str, Any]]:
    """Sandboxes that sessions have, by id."""
    rows = await db.fetch(
        "SELECT b.sandbox_id, b.tenant_id, b.session_id, b.node_id, b.driver, b.state, b.created_at, s.state AS session"
        " FROM sandboxes b JOIN sessions s USING (session_id) WHERE b.state <> 'released'"
        " AND ($1::text IS NULL OR b.node_id = $1) AND ($3::text IS NULL OR b.sandbox_id > $3)"
        " ORDER BY b.sandbox_id LIMIT $2",
        node_id,
        limit,
        after,
    )
    return [dict(row) for row in rows]
