"""Webhooks as their owner sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg

from runtime.errors import Conflict, NotFound
from runtime.store.database import Database

MOST = 32  # of a tenant: each is looked at whenever an event is written


async def create(
    db: Database, tenant_id: str, webhook_id: str, url: str, types: Sequence[str], description: str, secret: str
) -> bool:
    """False where it was made before. Raises Conflict at MOST of them."""

    async def work(connection: asyncpg.Connection) -> bool:
        await connection.execute("SELECT FROM tenants WHERE tenant_id = $1 FOR NO KEY UPDATE", tenant_id)
        if await connection.fetchval("SELECT true FROM webhooks WHERE webhook_id = $1", webhook_id):
            return False
        if await connection.fetchval("SELECT count(*) FROM webhooks WHERE tenant_id = $1", tenant_id) >= MOST:
            raise Conflict(f"there are {MOST} webhooks, and no more are taken; delete one first")
        await connection.execute(
            "INSERT INTO webhooks (webhook_id, tenant_id, url, types, description, secret)"
            " VALUES ($1, $2, $3, $4, $5, $6)",
            webhook_id,
            tenant_id,
            url,
            list(types),
            description,
            secret,
        )
        return True

    return await db.run(work)


async def get(db: Database, tenant_id: str, webhook_id: str) -> asyncpg.Record:
    """Raises NotFound."""
    row = await db.fetchrow("SELECT * FROM webhooks WHERE tenant_id = $1 AND webhook_id = $2", tenant_id, webhook_id)
    if row is None:
        raise NotFound(f"there is no webhook {webhook_id}")
    return row


async def listed(db: Database, tenant_id: str, limit: int, after: str | None) -> list[asyncpg.Record]:
    """By id; one more than `limit` if there are more."""
    return await db.fetch(
        "SELECT * FROM webhooks WHERE tenant_id = $1 AND ($2::text IS NULL OR webhook_id > $2)"
        " ORDER BY webhook_id LIMIT $3",
        tenant_id,
        after,
        limit + 1,
    )


async def change(db: Database, tenant_id: str, webhook_id: str, given: Mapping[str, Any]) -> None:
    """`given`: url, types, description, disabled; what is not in it stays. Raises NotFound."""
    row = await db.fetchrow(
        "UPDATE webhooks SET url = coalesce($3, url), types = coalesce($4::text[], types),"
        " description = coalesce($5, description), updated_at = now(),"
        " disabled_at = CASE WHEN $6::bool IS NULL THEN disabled_at WHEN $6 THEN coalesce(disabled_at, now()) END,"
        " disabled_why = CASE WHEN $6::bool IS NULL OR disabled_at IS NOT NULL AND $6 THEN disabled_why"
        " WHEN $6 THEN 'its owner asked for it' END"
        " WHERE tenant_id = $1 AND webhook_id = $2 RETURNING webhook_id",
        tenant_id,
        webhook_id,
        given.get("url"),
        given.get("types"),
        given.get("description"),
        given.get("disabled"),
    )
    if row is None:
        raise NotFound(f"there is no webhook {webhook_id}")


async def rotate(db: Database, tenant_id: str, webhook_id: str, request_id: str, secret: str, overlap_s: float) -> bool:
    """The present secret signs beside the new one for `overlap_s`. False where this request did so before. Raises
    NotFound."""
    await get(db, tenant_id, webhook_id)
    row = await db.fetchrow(
        "UPDATE webhooks SET old_secret = secret, old_until = now() + make_interval(secs => $5), secret = $4,"
        " rotated_by = $3, updated_at = now()"
        " WHERE tenant_id = $1 AND webhook_id = $2 AND rotated_by IS DISTINCT FROM $3 RETURNING webhook_id",
        tenant_id,
        webhook_id,
        request_id,
        secret,
        overlap_s,
    )
    return row is not None


async def delete(db: Database, tenant_id: str, webhook_id: str) -> None:
    """With all that was to be sent there. Raises NotFound."""
    gone = await db.fetchrow(
        "DELETE FROM webhooks WHERE tenant_id = $1 AND webhook_id = $2 RETURNING webhook_id", tenant_id, webhook_id
    )
    if gone is None:
        raise NotFound(f"there is no webhook {webhook_id}")


async def queue_test(db: Database, tenant_id: str, webhook_id: str, delivery_id: str) -> None:
    """A delivery that tells of nothing. Repeated with the same id: a no-op."""
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    body = {"type": "webhook.test", "timestamp": now, "data": {"webhook_id": webhook_id}}
    await db.execute(
        "INSERT INTO webhook_deliveries (delivery_id, tenant_id, webhook_id, type, body)"
        " VALUES ($1, $2, $3, 'webhook.test', $4) ON CONFLICT DO NOTHING",
        delivery_id,
        tenant_id,
        webhook_id,
        json.dumps(body),
    )


async def deliveries(
    db: Database, tenant_id: str, webhook_id: str, limit: int, state: str | None, after: str | None
) -> list[asyncpg.Record]:
    """Newest first; one more than `limit` if there are more."""
    return await db.fetch(
        "SELECT * FROM webhook_deliveries WHERE tenant_id = $1 AND webhook_id = $2 AND ($3::text IS NULL OR state = $3)"
        " AND ($4::text IS NULL OR (created_at, delivery_id) < (SELECT created_at, delivery_id FROM webhook_deliveries"
        "  WHERE delivery_id = $4 AND tenant_id = $1))"
        " ORDER BY created_at DESC, delivery_id DESC LIMIT $5",
        tenant_id,
        webhook_id,
        state,
        after,
        limit + 1,
    )


async def delivery(db: Database, tenant_id: str, webhook_id: str, delivery_id: str) -> asyncpg.Record:
    """Raises NotFound."""
    row = await db.fetchrow(
        "SELECT * FROM webhook_deliveries WHERE tenant_id = $1 AND webhook_id = $2 AND delivery_id = $3",
        tenant_id,
        webhook_id,
        delivery_id,
    )
    if row is None:
        raise NotFound(f"the webhook {webhook_id} has no delivery {delivery_id}")
    return row


async def replay(db: Database, tenant_id: str, webhook_id: str, delivery_id: str, request_id: str) -> None:
    """Send it again, under the same id. Raises NotFound; Conflict while it is sent, or its webhook is disabled."""
    row = await delivery(db, tenant_id, webhook_id, delivery_id)
    if row["replayed_by"] == request_id:
        return
    if (await get(db, tenant_id, webhook_id))["disabled_at"] is not None:
        raise Conflict(f"the webhook {webhook_id} is disabled; enable it first")
    asked = await db.fetchrow(
        "UPDATE webhook_deliveries SET state = 'pending', round = round + 1, attempts = 0, handed_at = NULL,"
        " next_at = now(), ended_at = NULL, replayed_by = $2 WHERE delivery_id = $1 AND state <> 'pending'"
        " RETURNING delivery_id",
        delivery_id,
        request_id,
    )
    if asked is None:
        raise Conflict(f"the delivery {delivery_id} is still being sent; its next try is due at {row['next_at']}")
