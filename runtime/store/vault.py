"""Secrets of tenants, sealed: names for people, values for calls."""

from __future__ import annotations

from collections.abc import Collection

import asyncpg

from runtime.errors import NotFound
from runtime.store.database import Database

_ABOUT = "name, created_at, updated_at, last_used_at"
_READ = "SELECT name, sealed FROM secrets WHERE tenant_id = $1 AND name = ANY($2)"
# Written at most once a minute: a busy tool is no reason to write a row for each of its calls.
_USE = (
    "WITH used AS (UPDATE secrets SET last_used_at = now() WHERE tenant_id = $1 AND name = ANY($2)"
    f" AND coalesce(last_used_at, '-infinity') < now() - interval '1 minute') {_READ}"
)


async def put(db: Database, tenant_id: str, name: str, sealed: str, key_id: str) -> asyncpg.Record:
    """Make or replace; what was there is gone."""
    row = await db.fetchrow(
        "INSERT INTO secrets (tenant_id, name, sealed, key_id) VALUES ($1, $2, $3, $4)"
        " ON CONFLICT (tenant_id, name) DO UPDATE SET sealed = $3, key_id = $4, updated_at = now()"
        f" RETURNING {_ABOUT}",
        tenant_id,
        name,
        sealed,
        key_id,
    )
    assert row is not None
    return row


async def listed(db: Database, tenant_id: str, limit: int, after: str | None) -> list[asyncpg.Record]:
    """By name; one more than `limit` if there are more."""
    return await db.fetch(
        f"SELECT {_ABOUT} FROM secrets WHERE tenant_id = $1 AND ($2::text IS NULL OR name > $2) ORDER BY name LIMIT $3",
        tenant_id,
        after,
        limit + 1,
    )


async def get(db: Database, tenant_id: str, name: str) -> asyncpg.Record:
    """Raises NotFound."""
    row = await db.fetchrow(f"SELECT {_ABOUT} FROM secrets WHERE tenant_id = $1 AND name = $2", tenant_id, name)
    if row is None:
        raise NotFound(f"there is no secret {name}")
    return row


async def delete(db: Database, tenant_id: str, name: str) -> None:
    """Calls that need it fail from now on. Raises NotFound."""
    if (
        await db.fetchrow("DELETE FROM secrets WHERE tenant_id = $1 AND name = $2 RETURNING name", tenant_id, name)
        is None
    ):
        raise NotFound(f"there is no secret {name}")


async def everybodys(db: Database) -> list[asyncpg.Record]:
    """Of every tenant, as they are kept."""
    return await db.fetch("SELECT tenant_id, name, sealed FROM secrets")


async def sealed(db: Database, tenant_id: str, names: Collection[str], *, using: bool = False) -> dict[str, str]:
    """Those of the names that there are, as they are kept. `using`: note that they were used."""
    if not names:
        return {}
    rows = await db.fetch(_USE if using else _READ, tenant_id, sorted(names))
    return {row["name"]: row["sealed"] for row in rows}
