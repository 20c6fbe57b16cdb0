"""What is to be sent to webhooks, as nodes see it."""

from __future__ import annotations

import asyncpg

from runtime.store.database import Database

# What was handed over comes again if its next try is long due: Temporal may have lost it.
_TO_HAND_OVER = (
    "SELECT delivery_id, round FROM webhook_deliveries WHERE state = 'pending' AND next_at < now()"
    " AND (handed_at IS NULL OR next_at < now() - interval '2 minutes') ORDER BY next_at LIMIT 200"
)


async def to_hand_over(db: Database) -> list[asyncpg.Record]:
    return await db.fetch(_TO_HAND_OVER)


async def note_handed(db: Database, delivery_id: str, round_no: int) -> None:
    await db.execute(
        "UPDATE webhook_deliveries SET handed_at = now() WHERE delivery_id = $1 AND round = $2", delivery_id, round_no
    )


async def to_send(db: Database, delivery_id: str, round_no: int) -> asyncpg.Record | None:
    """The delivery with its webhook, as it stands; None where there is nothing left to do."""
    return await db.fetchrow(
        "SELECT d.delivery_id, d.tenant_id, d.webhook_id, d.round, d.body, d.attempts, w.url, w.secret, w.disabled_at,"
        " extract(epoch FROM d.next_at - now())::float8 AS left_s,"
        " CASE WHEN w.old_until > now() THEN w.old_secret END AS old_secret"
        " FROM webhook_deliveries d JOIN webhooks w USING (webhook_id)"
        " WHERE d.delivery_id = $1 AND d.round = $2 AND d.state = 'pending'",
        delivery_id,
        round_no,
    )


async def note_try(
    db: Database, row: asyncpg.Record, state: str, status: int | None, error: str | None, wait_s: float
) -> None:
    """How a try ended. One that somebody else has noted meanwhile is not counted twice."""
    await db.execute(
        "UPDATE webhook_deliveries SET state = $4, attempts = attempts + 1, last_status = $5, last_error = $6,"
        " next_at = now() + make_interval(secs => $7), ended_at = CASE WHEN $4 <> 'pending' THEN now() END"
        " WHERE delivery_id = $1 AND round = $2 AND attempts = $3 AND state = 'pending'",
        row["delivery_id"],
        row["round"],
        row["attempts"],
        state,
        status,
        error,
        wait_s,
    )


async def cancel(db: Database, row: asyncpg.Record, why: str) -> None:
    await db.execute(
        "UPDATE webhook_deliveries SET state = 'cancelled', last_error = $3, ended_at = now()"
        " WHERE delivery_id = $1 AND round = $2 AND state = 'pending'",
        row["delivery_id"],
        row["round"],
        why,
    )


async def disable(db: Database, webhook_id: str, why: str) -> None:
    await db.execute(
        "UPDATE webhooks SET disabled_at = now(), disabled_why = $2 WHERE webhook_id = $1 AND disabled_at IS NULL",
        webhook_id,
        why,
    )
