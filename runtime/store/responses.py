"""Responses: turns of sessions, as OpenAI's clients know them; and their conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from runtime.errors import NotFound
from runtime.store.database import Database

Items = list[dict[str, Any]]
_COLUMNS = (
    "response_id, tenant_id, session_id, parent_id, conversation_id, message_id, from_pos, end_pos, end_step, base,"
    " root, input, kept, response, digest, stored"
)


@dataclass(frozen=True)
class Row:
    """A response. `kept` and `response` are there once it has ended."""

    response_id: str
    tenant_id: str
    session_id: str
    parent_id: str | None
    conversation_id: str | None
    message_id: str | None
    from_pos: int
    end_pos: int | None
    end_step: int | None
    base: dict[str, Any]
    root: dict[str, Any]
    input: Items
    kept: Items | None
    response: dict[str, Any] | None
    digest: str | None
    stored: bool


def _row(found: asyncpg.Record) -> Row:
    return Row(**dict(found))


async def find(db: Database, tenant_id: str, response_id: str) -> Row | None:
    found = await db.fetchrow(
        f"SELECT {_COLUMNS} FROM responses WHERE response_id = $1 AND tenant_id = $2", response_id, tenant_id
    )
    return _row(found) if found else None


async def get(db: Database, tenant_id: str, response_id: str) -> Row:
    """One that may be retrieved. Raises NotFound."""
    found = await find(db, tenant_id, response_id)
    if found is None or not found.stored:
        raise NotFound(f"there is no response {response_id!r}")
    return found


async def ended_with(db: Database, tenant_id: str, digests: Sequence[str]) -> Row | None:
    """The newest response whose conversation is one of these, the longest of them first."""
    found = await db.fetchrow(
        f"SELECT {_COLUMNS} FROM responses WHERE tenant_id = $1 AND digest = ANY($2::text[]) AND expires_at > now()"
        " ORDER BY array_position($2::text[], digest) DESC, created_at DESC LIMIT 1",
        tenant_id,
        list(digests),
    )
    return _row(found) if found else None


async def last_of(db: Database, conversation_id: str) -> Row | None:
    found = await db.fetchrow(
        f"SELECT {_COLUMNS} FROM responses WHERE conversation_id = $1 ORDER BY created_at DESC LIMIT 1", conversation_id
    )
    return _row(found) if found else None


async def is_head(db: Database, row: Row) -> bool:
    """Whether nothing has gone on from it in its session."""
    later = await db.fetchrow(
        "SELECT 1 FROM responses WHERE session_id = $1 AND from_pos >= $2 LIMIT 1", row.session_id, row.end_pos
    )
    return later is None


async def is_behind(db: Database, row: Row) -> bool:
    """Whether its session has gone on by itself, or as somebody else asked."""
    later = await db.fetchrow(
        "SELECT 1 FROM steps WHERE session_id = $1 AND step_no > $2 AND live AND kind IN ('input', 'think', 'tool')"
        " AND state = 'completed' LIMIT 1",
        row.session_id,
        row.end_step,
    )
    return later is not None


async def history(db: Database, row: Row) -> Items:
    """Every item up to and with what it made."""
    found = await db.fetch(
        "WITH RECURSIVE chain AS (SELECT *, 0 AS far FROM responses WHERE response_id = $1 UNION ALL"
        " SELECT r.*, chain.far + 1 FROM responses r JOIN chain ON r.response_id = chain.parent_id)"
        " SELECT base -> '_before' AS before, input, kept FROM chain ORDER BY far DESC",
        row.response_id,
    )
    return [item for one in found for item in (*(one["before"] or ()), *one["input"], *(one["kept"] or ()))]


async def claimed(db: Database, tenant_id: str, request_hash: str, count: int) -> Row | None:
    """The one response that the same request made within ten minutes, given to each further try once. None where there
    is none, or where it cannot be known which."""

    async def work(connection: asyncpg.Connection) -> asyncpg.Record | None:
        rows = await connection.fetch(
            "SELECT response_id FROM responses WHERE tenant_id = $1 AND request_hash = $2"
            " AND created_at > now() - interval '10 min' FOR UPDATE",
            tenant_id,
            request_hash,
        )
        if len(rows) != 1:
            return None
        return await connection.fetchrow(
            "UPDATE responses SET claims = claims || $2::int WHERE response_id = $1 AND NOT $2 = ANY(claims)"
            f" RETURNING {_COLUMNS}",
            rows[0]["response_id"],
            count,
        )

    found = await db.run(work)
    return _row(found) if found else None


async def forget(db: Database, response_id: str, session_id: str) -> None:
    """Nothing came of it."""
    await db.execute(
        "DELETE FROM responses WHERE response_id = $1 AND session_id = $2 AND response IS NULL", response_id, session_id
    )


async def add(db: Database, row: Row, keep_s: float, request_hash: str | None = None) -> bool:
    """False where there is another of that id. Raises NotFound where its conversation has been deleted meanwhile."""
    try:
        await _add(db, row, keep_s, request_hash)
        found = await find(db, row.tenant_id, row.response_id)
        return found is not None and found.session_id == row.session_id
    except asyncpg.ForeignKeyViolationError:
        raise NotFound(f"there is no conversation {row.conversation_id!r}") from None


async def _add(db: Database, row: Row, keep_s: float, request_hash: str | None) -> None:
    await db.execute(
        "INSERT INTO responses (response_id, tenant_id, session_id, parent_id, conversation_id, message_id, from_pos,"
        " base, root, input, stored, expires_at, request_hash)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, now() + make_interval(secs => $12), $13)"
        " ON CONFLICT DO NOTHING",
        row.response_id,
        row.tenant_id,
        row.session_id,
        row.parent_id,
        row.conversation_id,
        row.message_id,
        row.from_pos,
        row.base,
        row.root,
        row.input,
        row.stored,
        keep_s,
        request_hash,
    )


async def finish(
    db: Database, row: Row, *, end_pos: int, end_step: int | None, kept: Items, response: Mapping[str, Any], digest: str
) -> None:
    """It has ended: its items become part of its conversation. Repeated, by whoever saw it end: a no-op."""

    async def work(connection: asyncpg.Connection) -> None:
        conversation_id = await connection.fetchval(  # it may have been deleted meanwhile, and is not from here on
            "SELECT conversation_id FROM conversations WHERE conversation_id = $1 FOR KEY SHARE", row.conversation_id
        )
        done = await connection.fetchval(
            "UPDATE responses SET end_pos = $2, end_step = $3, kept = $4, response = $5, digest = $6"
            " WHERE response_id = $1 AND response IS NULL RETURNING true",
            row.response_id,
            end_pos,
            end_step,
            kept,
            dict(response),
            digest if response["status"] in ("completed", "incomplete") else None,
        )
        if done and conversation_id is not None:
            given = [(f"{row.response_id.replace('resp', 'in')}_{index}", item) for index, item in enumerate(row.input)]
            made = [
                (item.get("id") or f"{row.response_id.replace('resp', 'out')}_{n}", item) for n, item in enumerate(kept)
            ]
            await _append(connection, row.tenant_id, conversation_id, [*given, *made], row.response_id)

    await db.run(work)


async def remove(db: Database, tenant_id: str, response_id: str) -> bool:
    """It cannot be retrieved any more; what went on from it goes on."""
    done = await db.fetchrow(
        "UPDATE responses SET stored = false WHERE response_id = $1 AND tenant_id = $2 AND stored RETURNING true",
        response_id,
        tenant_id,
    )
    return done is not None


async def unfinished(db: Database, age_s: float) -> list[Row]:
    """The oldest that were accepted longer ago."""
    rows = await db.fetch(
        f"SELECT {_COLUMNS} FROM responses WHERE response IS NULL AND created_at < now() - make_interval(secs => $1)"
        " ORDER BY created_at LIMIT 1000",
        age_s,
    )
    return [_row(one) for one in rows]


async def was_answered(db: Database, row: Row) -> bool:
    """Whether the session was given the answers that the response begins with."""
    found = await db.fetchrow(
        "SELECT 1 FROM events WHERE session_id = $1 AND pos > $2 AND type = 'question.answered' LIMIT 1",
        row.session_id,
        row.from_pos,
    )
    return found is not None


async def expired_sessions(db: Database) -> list[tuple[str, str]]:
    """Tenants and sessions that rest, and that no response needs any longer."""
    rows = await db.fetch(
        "SELECT s.tenant_id, s.session_id FROM responses r JOIN sessions s USING (session_id)"
        " WHERE s.state IN ('created', 'idle', 'waiting', 'failed', 'paused') AND s.ending IS NULL"
        " GROUP BY s.tenant_id, s.session_id HAVING max(r.expires_at) < now() LIMIT 100"
    )
    return [(row["tenant_id"], row["session_id"]) for row in rows]


# -- conversations ----------------------------------------------------------------------------------------------------


async def add_conversation(
    db: Database, tenant_id: str, conversation_id: str, metadata: Mapping[str, str], items: Sequence[tuple[str, Any]]
) -> None:
    async def work(connection: asyncpg.Connection) -> None:
        made = await connection.fetchval(
            "INSERT INTO conversations (conversation_id, tenant_id, metadata) VALUES ($1, $2, $3)"
            " ON CONFLICT DO NOTHING RETURNING true",
            conversation_id,
            tenant_id,
            dict(metadata),
        )
        if made:
            await _append(connection, tenant_id, conversation_id, items, None)

    await db.run(work)


async def conversation(db: Database, tenant_id: str, conversation_id: str) -> asyncpg.Record:
    """Raises NotFound."""
    found = await db.fetchrow(
        "SELECT conversation_id, metadata, created_at FROM conversations WHERE conversation_id = $1 AND tenant_id = $2",
        conversation_id,
        tenant_id,
    )
    if found is None:
        raise NotFound(f"there is no conversation {conversation_id!r}")
    return found


async def set_metadata(db: Database, conversation_id: str, metadata: Mapping[str, str]) -> None:
    await db.execute(
        "UPDATE conversations SET metadata = $2 WHERE conversation_id = $1", conversation_id, dict(metadata)
    )


async def remove_conversation(db: Database, conversation_id: str) -> None:
    await db.execute("DELETE FROM conversations WHERE conversation_id = $1", conversation_id)


async def add_items(db: Database, tenant_id: str, conversation_id: str, items: Sequence[tuple[str, Any]]) -> None:
    await db.run(lambda connection: _append(connection, tenant_id, conversation_id, items, None))


async def _append(
    connection: asyncpg.Connection,
    tenant_id: str,
    conversation_id: str,
    items: Sequence[tuple[str, Any]],
    response_id: str | None,
) -> None:
    for item_id, item in items:
        await connection.execute(
            "INSERT INTO conversation_items (conversation_id, item_id, tenant_id, item, response_id)"
            " VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
            conversation_id,
            item_id,
            tenant_id,
            {**item, "id": item_id},
            response_id,
        )


async def items_of(
    db: Database, conversation_id: str, limit: int | None = None, after: str | None = None, newest_first: bool = False
) -> list[asyncpg.Record]:
    """`item`, `response_id`, in order."""
    way, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
    return await db.fetch(
        "SELECT item, response_id FROM conversation_items WHERE conversation_id = $1 AND ($2::text IS NULL OR seq"
        f" {beyond} (SELECT seq FROM conversation_items WHERE conversation_id = $1 AND item_id = $2))"
        f" ORDER BY seq {way} LIMIT $3",
        conversation_id,
        after,
        limit,
    )


async def item_of(db: Database, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Raises NotFound."""
    found = await db.fetchrow(
        "SELECT item FROM conversation_items WHERE conversation_id = $1 AND item_id = $2", conversation_id, item_id
    )
    if found is None:
        raise NotFound(f"there is no item {item_id!r} in the conversation {conversation_id}")
    return dict(found["item"])


async def remove_item(db: Database, conversation_id: str, item_id: str) -> None:
    await db.execute(
        "DELETE FROM conversation_items WHERE conversation_id = $1 AND item_id = $2", conversation_id, item_id
    )
