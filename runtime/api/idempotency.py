"""`Idempotency-Key`: the first request with a key decides which thing it made; a repeat finds the same thing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import asyncpg
from fastapi import Request

from runtime.errors import Conflict, InvalidRequest
from runtime.store import Database
from runtime.store.sessions import new_id

_FIND: Final = "SELECT route, body_sha256, response FROM idempotency WHERE tenant_id = $1 AND key = $2"
_NOTE: Final = (
    "INSERT INTO idempotency (tenant_id, key, route, body_sha256, response) VALUES ($1, $2, $3, $4, $5)"
    " ON CONFLICT DO NOTHING"
)


async def recorded(
    request: Request, db: Database, tenant_id: str, *, digest: bytes | None = None
) -> dict[str, Any] | None:
    """What was noted of the request with this key, if there was one. Raises Conflict if it was another request."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    row = await db.fetchrow(_FIND, tenant_id, key)
    if row is None:
        return None
    _ensure_same(row, _route(request), await _digest(request, digest))
    return dict(row["response"])


async def made_before(request: Request, db: Database, tenant_id: str, *, digest: bytes | None = None) -> str | None:
    """The id that a request with this key made before, if any. Asked first: a retry is answered as the first was,
    whatever has changed since. `digest`: sha256 of the body, where that was read as it came. Raises Conflict if the key
    was used for another request."""
    found = await recorded(request, db, tenant_id, digest=digest)
    return None if found is None else str(found["id"])


async def claim(
    connection: asyncpg.Connection,
    request: Request,
    tenant_id: str,
    noted: Mapping[str, Any],
    *,
    digest: bytes | None = None,
) -> tuple[dict[str, Any], bool]:
    """Note what a request with this key makes, in the transaction that makes it. Returns what is noted, and whether
    that was done here. Raises InvalidRequest, Conflict."""
    key = _key(request)
    if key is None:
        return dict(noted), True
    route, digest = _route(request), await _digest(request, digest)
    mine = await connection.fetchval(f"{_NOTE} RETURNING true", tenant_id, key, route, digest, dict(noted))
    row = await connection.fetchrow(_FIND, tenant_id, key)
    _ensure_same(row, route, digest)
    return dict(row["response"]), bool(mine)


async def id_for(request: Request, db: Database, tenant_id: str, prefix: str, *, digest: bytes | None = None) -> str:
    """The id of what this request makes: new, or the one that its key made before.

    Raises Conflict if the key was used for another request.
    """
    fresh = new_id(prefix)
    if _key(request) is None:
        return fresh
    noted, _ = await db.run(lambda connection: claim(connection, request, tenant_id, {"id": fresh}, digest=digest))
    return str(noted["id"])


def _key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= 255:
        raise InvalidRequest("Idempotency-Key must have 1 to 255 characters", param="Idempotency-Key")
    return key


def _route(request: Request) -> str:
    return f"{request.method} {request.url.path}"


def _ensure_same(row: asyncpg.Record, route: str, digest: bytes) -> None:
    if row["route"] != route or row["body_sha256"] != digest:
        raise Conflict("this Idempotency-Key was used for another request; use a new key", code="idempotency_mismatch")


async def _digest(request: Request, known: bytes | None) -> bytes:
    """Of the body, where that was not read as it came."""
    return known if known is not None else hashlib.sha256(await request.body()).digest()
