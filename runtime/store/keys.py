"""API keys: who a request comes from, and how often it may. Of a key only its sha256 and its first letters are kept."""

from __future__ import annotations

import datetime
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from runtime.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unauthorized
from runtime.store.database import Database

SHOWN: Final = 11  # characters of a key that its owner may see again: `tk_` and eight more
# Changes after which an admin key must be left run one after another.
_LOCK_ADMINS: Final = "SELECT pg_advisory_xact_lock(hashtext('tenuto_admin_keys'))"
_LIVES: Final = "revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())"


@dataclass(frozen=True)
class Caller:
    """Who a request comes from."""

    tenant_id: str
    key_id: str
    scope: str
    requests_per_minute: int | None = None


@dataclass(frozen=True)
class NewKey:
    """What a key is to be. `expires_at`: None for never; `requests_per_minute`: None for any number."""

    tenant_id: str
    scope: str
    name: str = ""
    expires_at: datetime.datetime | None = None
    requests_per_minute: int | None = None


def make() -> str:
    """A key: 32 random bytes."""
    return "tk_" + secrets.token_urlsafe(32)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def caller(db: Database, key: str) -> Caller:
    """Whose key it is. Raises Unauthorized, Forbidden. That it was used is noted at most once a minute."""
    row = await db.fetchrow(
        "SELECT k.key_id, k.tenant_id, k.scope, k.requests_per_minute, k.revoked_at, k.expires_at,"
        " k.expires_at <= now() AS expired, t.disabled_at,"
        " coalesce(k.last_used_at < now() - interval '1 minute', true) AS stale"
        " FROM api_keys k JOIN tenants t USING (tenant_id) WHERE k.sha256 = $1",
        digest(key),
    )
    if row is None or row["revoked_at"] is not None:
        raise Unauthorized("this API key is not known here, or was revoked")
    if row["expired"]:
        raise Unauthorized(f"this API key expired at {row['expires_at'].isoformat(timespec='seconds')}; use a new one")
    if row["disabled_at"] is not None:
        raise Forbidden(f"the tenant {row['tenant_id']} is disabled; an operator can enable it", code="tenant_disabled")
    if row["stale"]:
        await db.execute(
            "UPDATE api_keys SET last_used_at = now() WHERE key_id = $1"
            " AND coalesce(last_used_at < now() - interval '1 minute', true)",
            row["key_id"],
        )
    return Caller(row["tenant_id"], row["key_id"], row["scope"], row["requests_per_minute"])


async def caller_of(db: Database, key_id: str) -> Caller:
    """Who a key belongs to that has been seen before. Raises Unauthorized where it works no more."""
    row = await db.fetchrow(
        "SELECT k.* FROM api_keys k JOIN tenants USING (tenant_id)"
        f" WHERE key_id = $1 AND {_LIVES} AND disabled_at IS NULL",
        key_id,
    )
    if row is None:
        raise Unauthorized("the key that you came with works no more")
    return Caller(row["tenant_id"], row["key_id"], row["scope"], row["requests_per_minute"])


async def works(db: Database, key_id: str) -> bool:
    """Whether what began with the key may go on."""
    row = await db.fetchrow(
        "SELECT true FROM api_keys JOIN tenants USING (tenant_id)"
        f" WHERE key_id = $1 AND {_LIVES} AND disabled_at IS NULL",
        key_id,
    )
    return row is not None


async def insert(connection: asyncpg.Connection, key_id: str, key: str, new: NewKey) -> bool:
    """False: there is such a key already. Raises InvalidRequest where there is no such tenant."""
    if not await connection.fetchval("SELECT true FROM tenants WHERE tenant_id = $1", new.tenant_id):
        raise InvalidRequest(f"tenant: there is no tenant {new.tenant_id}; create it first", param="tenant")
    made = await connection.fetchval(
        "INSERT INTO api_keys (key_id, tenant_id, sha256, scope, name, prefix, expires_at, requests_per_minute)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (key_id) DO NOTHING RETURNING true",
        key_id,
        new.tenant_id,
        digest(key),
        new.scope,
        new.name,
        key[:SHOWN],
        new.expires_at,
        new.requests_per_minute,
    )
    return bool(made)


async def get(db: Database, key_id: str) -> dict[str, Any]:
    """Raises NotFound."""
    row = await db.fetchrow(f"SELECT *, {_LIVES} AS lives FROM api_keys WHERE key_id = $1", key_id)
    if row is None:
        raise NotFound(f"there is no key {key_id}")
    return dict(row)


async def listed(db: Database, tenant_id: str | None, after: str | None, limit: int) -> Sequence[dict[str, Any]]:
    """Newest first. Raises InvalidRequest where `after` is no key."""
    if after is not None and not await db.fetchrow("SELECT true FROM api_keys WHERE key_id = $1", after):
        raise InvalidRequest(f"after is {after!r}, which is no key; use the last_id of a page", param="after")
    rows = await db.fetch(
        f"SELECT *, {_LIVES} AS lives FROM api_keys WHERE ($1::text IS NULL OR tenant_id = $1)"
        " AND ($2::text IS NULL OR (created_at, key_id) <"
        " (SELECT created_at, key_id FROM api_keys WHERE key_id = $2))"
        " ORDER BY created_at DESC, key_id DESC LIMIT $3",
        tenant_id,
        after,
        limit,
    )
    return [dict(row) for row in rows]


async def revoke(connection: asyncpg.Connection, key_id: str) -> bool:
    """False: it was revoked before. Raises NotFound; Conflict where no admin key would be left."""
    await connection.execute(_LOCK_ADMINS)
    row = await connection.fetchrow("SELECT revoked_at FROM api_keys WHERE key_id = $1 FOR UPDATE", key_id)
    if row is None:
        raise NotFound(f"there is no key {key_id}")
    if row["revoked_at"] is not None:
        return False
    await connection.execute("UPDATE api_keys SET revoked_at = now() WHERE key_id = $1", key_id)
    await ensure_an_admin(connection, f"{key_id} is the last admin key that works; create another one first")
    return True


async def rotate(connection: asyncpg.Connection, key_id: str, new_id: str, key: str, grace_s: int) -> bool:
    """A new key in the place of one that ends in `grace_s`. False: `new_id` is there already.

    Raises NotFound; Conflict where the key does not work any more, or was rotated before.
    """
    await connection.execute(_LOCK_ADMINS)
    row = await connection.fetchrow(f"SELECT *, {_LIVES} AS lives FROM api_keys WHERE key_id = $1 FOR UPDATE", key_id)
    if row is None:
        raise NotFound(f"there is no key {key_id}")
    if row["rotated_to"] == new_id:
        return False
    if row["rotated_to"] is not None:
        raise Conflict(f"{key_id} was rotated already; its successor is {row['rotated_to']}")
    if not row["lives"]:
        raise Conflict(f"{key_id} does not work any more; create a new key instead")
    new = NewKey(row["tenant_id"], row["scope"], row["name"], row["expires_at"], row["requests_per_minute"])
    await insert(connection, new_id, key, new)
    await connection.execute(
        "UPDATE api_keys SET rotated_to = $2, expires_at = least(expires_at, now() + make_interval(secs => $3))"
        " WHERE key_id = $1",
        key_id,
        new_id,
        grace_s,
    )
    return True


async def lock_admins(connection: asyncpg.Connection) -> None:
    """Before a change after which `ensure_an_admin` is asked."""
    await connection.execute(_LOCK_ADMINS)


async def ensure_an_admin(connection: asyncpg.Connection, otherwise: str) -> None:
    """Raises Conflict where no admin key works any more, or none a day longer: what is about to end, as a key that was
    rotated, would lock operators out later."""
    left = await connection.fetchval(
        f"SELECT true FROM api_keys JOIN tenants USING (tenant_id) WHERE scope = 'admin' AND {_LIVES}"
        " AND coalesce(expires_at > now() + interval '1 day', true) AND disabled_at IS NULL LIMIT 1"
    )
    if not left:
        raise Conflict(otherwise, code="last_admin_key")
