"""Nodes, where KV lies, and who may call: what the installation knows of itself."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import asyncpg

from runtime.errors import Conflict, NotFound
from runtime.store.database import Database

DEFAULT_TENANT = "default"
NODE_ALIVE_S = 15


async def ensure_admin(db: Database, key: str) -> None:
    """The default tenant and the admin key of an installation. Only the key's hash is kept."""

    async def work(connection: asyncpg.Connection) -> None:
        await connection.execute(
            "INSERT INTO tenants (tenant_id, salt) VALUES ($1, $2) ON CONFLICT DO NOTHING",
            DEFAULT_TENANT,
            secrets.token_bytes(32),
        )
        await connection.execute(
            "INSERT INTO api_keys (key_id, tenant_id, sha256, scope, name) VALUES ($1, $2, $3, 'admin', 'admin.key')"
            " ON CONFLICT DO NOTHING",
            "key_admin_" + hashlib.sha256(key.encode()).hexdigest()[:12],
            DEFAULT_TENANT,
            hashlib.sha256(key.encode()).digest(),
        )

    await db.run(work)


async def register_node(
    db: Database,
    node_id: str,
    boot: str,
    queue: str,
    card: Mapping[str, Any],
    sandbox: Mapping[str, Any],
    engine: str | None = None,
    chat: str | None = None,
) -> None:
    """A new life of a node: it takes sessions, whatever was asked of the one before. `chat`: see `store.chats`."""
    await db.execute(
        "INSERT INTO nodes (node_id, boot, queue, card, sandbox, engine, chat) VALUES ($1, $2, $3, $4, $5, $6, $7)"
        " ON CONFLICT (node_id) DO UPDATE SET boot = $2, queue = $3, card = $4, sandbox = $5, engine = $6, chat = $7,"
        " heartbeat_at = now(), engine_at = now(), draining = false, drained_at = NULL, wanted_back = false",
        node_id,
        boot,
        queue,
        dict(card),
        dict(sandbox),
        engine,
        chat,
    )


async def heartbeat(db: Database, node_id: str, boot: str, *, engine_answers: bool = True) -> bool:
    """Renew the lease of this life of a node; True if it was asked to drain."""
    row = await db.fetchrow(
        "UPDATE nodes SET heartbeat_at = now(), engine_at = CASE WHEN $3 THEN now() ELSE engine_at END"
        " WHERE node_id = $1 AND boot = $2 RETURNING draining",
        node_id,
        boot,
        engine_answers,
    )
    return bool(row and row["draining"])


async def ask_to_drain(db: Database, node_id: str) -> None:
    """The node gets no more sessions from now on, and is told at its next heartbeat. Idempotent. Raises NotFound."""
    row = await db.fetchrow(
        "UPDATE nodes SET draining = true, wanted_back = false WHERE node_id = $1 RETURNING node_id", node_id
    )
    if row is None:
        raise NotFound(f"there is no node {node_id}")


async def ask_back(db: Database, node_id: str) -> None:
    """A node that drains, or is drained, is to begin a new life; it takes sessions in that one, and none before. Raises
    NotFound; Conflict where it does not drain."""
    row = await db.fetchrow(
        "UPDATE nodes SET wanted_back = true WHERE node_id = $1 AND draining RETURNING node_id", node_id
    )
    if row is None:
        if await db.fetchrow("SELECT true FROM nodes WHERE node_id = $1", node_id) is None:
            raise NotFound(f"there is no node {node_id}")
        raise Conflict(f"node {node_id} does not drain")


async def wanted_back(db: Database, node_id: str, boot: str) -> bool:
    """Whether this life of a node is to end so that the next one takes sessions."""
    row = await db.fetchrow("SELECT wanted_back FROM nodes WHERE node_id = $1 AND boot = $2", node_id, boot)
    return bool(row and row["wanted_back"])


async def note_drained(db: Database, node_id: str, boot: str) -> None:
    await db.execute("UPDATE nodes SET drained_at = now() WHERE node_id = $1 AND boot = $2", node_id, boot)


async def nodes(db: Database) -> list[dict[str, Any]]:
    rows = await db.fetch(
        "SELECT node_id, boot, queue, card, sandbox, engine, chat, draining, drained_at,"
        " heartbeat_at > now() - make_interval(secs => $1) AS alive,"
        " extract(epoch FROM now() - heartbeat_at)::float8 AS age_s,"
        " (SELECT count(*) FROM sessions s WHERE s.node_id = n.node_id"
        "   AND s.state NOT IN ('cancelled', 'completed')) AS sessions,"
        " (SELECT count(*) FROM sessions s WHERE s.node_id = n.node_id AND s.state IN ('thinking', 'tool_running'))"
        " AS running,"
        " (SELECT count(*) FROM sandboxes b WHERE b.node_id = n.node_id AND b.state = 'live') AS sandboxes"
        " FROM nodes n ORDER BY node_id",
        NODE_ALIVE_S,
        patience_s=2,
    )
    return [dict(row) for row in rows]


async def sessions_on(db: Database, node_id: str) -> list[dict[str, Any]]:
    """Open sessions of a node, with what is needed to move their pages."""
    rows = await db.fetch(
        "SELECT s.session_id, s.tenant_id, s.epoch, coalesce(d.salt, t.salt) AS salt FROM sessions s"
        " JOIN tenants t USING (tenant_id) LEFT JOIN kv_domains d ON d.domain_id = s.kv_domain"
        " WHERE s.node_id = $1 AND s.state NOT IN ('created', 'cancelling', 'cancelled', 'completed')"
        " ORDER BY s.session_id",
        node_id,
    )
    return [dict(row) for row in rows]


async def other_engines(db: Database, session_id: str, node_id: str) -> list[str]:
    """Engines of living nodes, other than `node_id`, that have worked for a session."""
    rows = await db.fetch(
        "SELECT engine FROM nodes WHERE node_id <> $2 AND engine IS NOT NULL"
        " AND heartbeat_at > now() - make_interval(secs => $3)"
        " AND node_id IN (SELECT node_id FROM attempts WHERE session_id = $1) ORDER BY node_id",
        session_id,
        node_id,
        NODE_ALIVE_S,
    )
    return [row["engine"] for row in rows]


async def ended_elsewhere(db: Database, node_id: str, within_s: float) -> list[dict[str, Any]]:
    """Sessions for which a node has worked and which another one ended of late."""
    rows = await db.fetch(
        "SELECT s.session_id, s.epoch, t.salt FROM sessions s JOIN tenants t USING (tenant_id)"
        " WHERE s.state IN ('cancelled', 'completed') AND s.updated_at > now() - make_interval(secs => $2)"
        " AND s.node_id <> $1 AND EXISTS"
        " (SELECT FROM attempts a WHERE a.node_id = $1 AND a.session_id = s.session_id)",
        node_id,
        within_s,
    )
    return [dict(row) for row in rows]


async def note_sandboxes(db: Database, node_id: str, boot: str, sandbox: Mapping[str, Any]) -> None:
    """What a node's driver is and what its pool has, as it is now."""
    await db.execute(
        "UPDATE nodes SET sandbox = $3 WHERE node_id = $1 AND boot = $2 AND sandbox IS DISTINCT FROM $3",
        node_id,
        boot,
        dict(sandbox),
    )


async def note_residency(db: Database, session_id: str, tenant_id: str, tier: str, detail: Mapping[str, Any]) -> None:
    await db.execute(
        "INSERT INTO kv_residency (session_id, tenant_id, tier, detail) VALUES ($1, $2, $3, $4)"
        " ON CONFLICT (session_id) DO UPDATE SET tier = $3, detail = $4, updated_at = now()",
        session_id,
        tenant_id,
        tier,
        dict(detail),
    )


async def private_pages(db: Database, session_id: str) -> list[str]:
    """Keys (hex) of pages that this session's checkpoints name and no other open session's do."""
    rows = await db.fetch(
        "SELECT DISTINCT encode(key, 'hex') AS key FROM checkpoints, unnest(kv_new) AS key WHERE session_id = $1"
        " EXCEPT SELECT encode(key, 'hex') FROM checkpoints JOIN sessions s USING (session_id), unnest(kv_new) AS key"
        " WHERE session_id <> $1 AND s.state NOT IN ('cancelled', 'completed')",
        session_id,
    )
    return [row["key"] for row in rows]
