"""`Idempotency-Key`: the first request with a key decides which thing it made; a repeat finds the same thing."""

from __future__ import annotations

import hashlib

import asyncpg
from fastapi import Request

from runtime.errors import Conflict, InvalidRequest
from runtime.store import Database
from runtime.store.sessions import new_id


async def made_before(request: Request, db: Database, tenant_id: str, *, digest: bytes | None = None) -> str | None:
    """The id that a request with this key made before, if any. Asked first: a retry is answered as the first was,
    whatever has changed since. Raises Conflict if the key was used for another request."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    row = await db.fetchrow(
        "SELECT route, body_sha256, response FROM idempotency WHERE tenant_id = $1 AND key = $2", tenant_id, key
    )
    if row is None:
        return None
    _ensure_same(row, _route(request), await _digest(request, digest))
    return str(row["response"]["id"])


async def id_for(request: Request, db: Database, tenant_id: str, prefix: str, *, digest: bytes | None = None) -> str:
    """The id of what this request makes: new, or the one that its key made before.

    Raises Conflict if the key was used for another request.
    """
    key = request.headers.get("idempotency-key")
    fresh = new_id(prefix)
    if key is None:
        return fresh
    if not 1 <= len(key) <= 255:
        raise InvalidRequest("Idempotency-Key must have 1 to 255 characters", param="Idempotency-Key")
    route = _route(request)
    digest = await _digest(request, digest)

    async def work(connection: asyncpg.Connection) -> asyncpg.Record:
        await connection.execute(
            "INSERT INTO idempotency (tenant_id, key, route, body_sha256, response) VALUES ($1, $2, $3, $4, $5)"
            " ON CONFLICT DO NOTHING",
            tenant_id,
            key,
            route,
            digest,
            {"id": fresh},
        )
        return await connection.fetchrow(
            "SELECT route, body_sha256, response FROM idempotency WHERE tenant_id = $1 AND key = $2",
            tenant_id,
            key,
        )

    row = await db.run(work)
    _ensure_same(row, route, digest)
    return str(row["response"]["id"])


async def _digest(request: Request, known: bytes | None) -> bytes:
    """Of the body, where that was not read as it came."""
    return known if known is not None else hashlib.sha256(await request.body()).digest()


def _route(request: Request) -> str:
    return f"{request.method} {request.url.path}"


def _ensure_same(row: asyncpg.Record, route: str, digest: bytes) -> None:
    if row["route"] != route or row["body_sha256"] != digest:
        raise Conflict("this Idempotency-Key was used for another request; use a new key", code="idempotency_mismatch")
