"""Nodes, sandboxes, where KV lies, and who may call: what the installation knows of itself."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import asyncpg

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
            "INSERT INTO api_keys (key_id, tenant_id, sha256, scope) VALUES ($1, $2, $3, 'admin')"
            " ON CONFLICT DO NOTHING",
            "key_admin_" + hashlib.sha256(key.encode()).hexdigest()[:12],
            DEFAULT_TENANT,
            hashlib.sha256(key.encode()).digest(),
        )

    await db.run(work)


async def tenant_of_key(db: Database, key: str) -> str | None:
    row = await db.fetchrow(
        "SELECT tenant_id FROM api_keys WHERE sha256 = $1 AND revoked_at IS NULL",
        hashlib.sha256(key.encode()).digest(),
    )
    return row["tenant_id"] if row else None


async def register_node(
    db: Database, node_id: str, boot: str, queue: str, card: Mapping[str, Any], sandbox: Mapping[str, Any]
) -> None:
    await db.execute(
        "INSERT INTO nodes (node_id, boot, queue, card, sandbox) VALUES ($1, $2, $3, $4, $5)"
        " ON CONFLICT (node_id) DO UPDATE SET boot = $2, queue = $3, card = $4, sandbox = $5, heartbeat_at = now()",
        node_id,
        boot,
        queue,
        dict(card),
        dict(sandbox),
    )


async def heartbeat(db: Database, node_id: str, boot: str) -> None:
    await db.execute("UPDATE nodes SET heartbeat_at = now() WHERE node_id = $1 AND boot = $2", node_id, boot)


async def nodes(db: Database) -> list[dict[str, Any]]:
    rows = await db.fetch(
        "SELECT node_id, boot, queue, card, sandbox,"
        " heartbeat_at > now() - make_interval(secs => $1) AS alive FROM nodes ORDER BY node_id",
        NODE_ALIVE_S,
        patience_s=2,
    )
    return [dict(row) for row in rows]


async def open_sandbox(
    db: Database, tenant_id: str, session_id: str, sandbox_id: str, node_id: str, driver: str
) -> None:
    """Announce a sandbox before it exists, so that the reaper knows it from its first moment."""
    await db.execute(
        "INSERT INTO sandboxes (sandbox_id, tenant_id, session_id, node_id, driver, state)"
        " VALUES ($1, $2, $3, $4, $5, 'creating') ON CONFLICT DO NOTHING",
        sandbox_id,
        tenant_id,
        session_id,
        node_id,
        driver,
    )


async def keep_sandbox(db: Database, sandbox_id: str, handle: Mapping[str, Any]) -> None:
    await db.execute(
        "UPDATE sandboxes SET state = 'live', handle = $2 WHERE sandbox_id = $1 AND state = 'creating'",
        sandbox_id,
        dict(handle),
    )


async def sandbox_of(db: Database, session_id: str) -> dict[str, Any] | None:
    row = await db.fetchrow("SELECT * FROM sandboxes WHERE session_id = $1 AND state <> 'released'", session_id)
    return dict(row) if row else None


async def close_sandbox(db: Database, sandbox_id: str) -> None:
    await db.execute(
        "UPDATE sandboxes SET state = 'released', released_at = now() WHERE sandbox_id = $1 AND state <> 'released'",
        sandbox_id,
    )


async def live_sandboxes(db: Database, node_id: str) -> set[str]:
    rows = await db.fetch("SELECT sandbox_id FROM sandboxes WHERE node_id = $1 AND state <> 'released'", node_id)
    return {row["sandbox_id"] for row in rows}


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
