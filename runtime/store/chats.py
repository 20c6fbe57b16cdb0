"""Chat formats of the models that nodes serve, by the digest of what they are."""

from __future__ import annotations

import asyncpg

from runtime.store.database import Database


async def publish(db: Database, digest: str, data: bytes) -> None:
    """Keep the format that a node is about to name. What no node has named for an hour is removed."""

    async def work(connection: asyncpg.Connection) -> None:
        known = await connection.fetchval(
            "UPDATE chat_formats SET created_at = now() WHERE digest = $1 RETURNING true", digest
        )
        if not known:
            await connection.execute(
                "INSERT INTO chat_formats (digest, data) VALUES ($1, $2) ON CONFLICT DO NOTHING", digest, data
            )
        await connection.execute(
            "DELETE FROM chat_formats c WHERE created_at < now() - interval '1 hour'"
            " AND NOT EXISTS (SELECT FROM nodes WHERE chat = c.digest)"
        )

    await db.run(work)


async def data_of(db: Database, digest: str) -> bytes | None:
    row = await db.fetchrow("SELECT data FROM chat_formats WHERE digest = $1", digest)
    return bytes(row["data"]) if row else None
