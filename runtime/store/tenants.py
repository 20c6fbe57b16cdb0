"""Tenants: whose things are kept apart, each with a salt of its own, and how much each may use."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import asyncpg

from runtime.errors import Conflict, InvalidRequest, NotFound
from runtime.store import keys
from runtime.store.database import Database

QUOTAS: Final = ("open_sessions", "tokens_per_day", "disk_bytes", "sandboxes")


async def create(connection: asyncpg.Connection, tenant_id: str, quotas: Mapping[str, int | None]) -> None:
    """Raises Conflict where there is one of that name."""
    made = await connection.fetchval(
        "INSERT INTO tenants (tenant_id, salt, open_sessions, tokens_per_day, disk_bytes, sandboxes)"
        " VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING RETURNING true",
        tenant_id,
        secrets.token_bytes(32),
        *(quotas.get(name) for name in QUOTAS),
    )
    if not made:
        raise Conflict(f"there is a tenant {tenant_id} already; use another name", code="tenant_exists")


async def get(db: Database, tenant_id: str) -> dict[str, Any]:
    """Raises NotFound."""
    row = await db.fetchrow("SELECT * FROM tenants WHERE tenant_id = $1", tenant_id)
    if row is None:
        raise NotFound(f"there is no tenant {tenant_id}")
    return dict(row)


async def listed(db: Database, after: str | None, limit: int) -> Sequence[dict[str, Any]]:
    """By name. Raises InvalidRequest where `after` is no tenant."""
    if after is not None and not await db.fetchrow("SELECT true FROM tenants WHERE tenant_id = $1", after):
        raise InvalidRequest(f"after is {after!r}, which is no tenant; use the last_id of a page", param="after")
    rows = await db.fetch(
        "SELECT * FROM tenants WHERE ($1::text IS NULL OR tenant_id > $1) ORDER BY tenant_id LIMIT $2", after, limit
    )
    return [dict(row) for row in rows]


async def set_quotas(connection: asyncpg.Connection, tenant_id: str, quotas: Mapping[str, int | None]) -> None:
    """Those that are named; None is no limit. What is used already stays. Raises NotFound."""
    await _locked(connection, tenant_id)
    for name in QUOTAS:
        if name in quotas:
            await connection.execute(f"UPDATE tenants SET {name} = $2 WHERE tenant_id = $1", tenant_id, quotas[name])


async def disable(connection: asyncpg.Connection, tenant_id: str) -> bool:
    """Its keys are refused from now on; its sessions stay as they are. False: it was disabled before.

    Raises NotFound; Conflict where no admin key would work any more.
    """
    await keys.lock_admins(connection)
    if (await _locked(connection, tenant_id))["disabled_at"] is not None:
        return False
    await connection.execute("UPDATE tenants SET disabled_at = now() WHERE tenant_id = $1", tenant_id)
    await keys.ensure_an_admin(
        connection, f"{tenant_id} has the last admin key that works; create one of another tenant first"
    )
    return True


async def enable(connection: asyncpg.Connection, tenant_id: str) -> bool:
    """False: it was not disabled. Raises NotFound."""
    if (await _locked(connection, tenant_id))["disabled_at"] is None:
        return False
    await connection.execute("UPDATE tenants SET disabled_at = NULL WHERE tenant_id = $1", tenant_id)
    return True


async def _locked(connection: asyncpg.Connection, tenant_id: str) -> asyncpg.Record:
    row = await connection.fetchrow("SELECT * FROM tenants WHERE tenant_id = $1 FOR NO KEY UPDATE", tenant_id)
    if row is None:
        raise NotFound(f"there is no tenant {tenant_id}")
    return row
