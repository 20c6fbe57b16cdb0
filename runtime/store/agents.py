"""Agents: names, and versions that never change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from runtime.errors import Conflict, InvalidRequest, NotFound
from runtime.store.database import Database

_AGENT = (
    "SELECT a.name, a.latest, a.created_at, a.updated_at, a.archived_at, v.config, v.description, v.metadata"
    " FROM agents a JOIN agent_versions v ON v.tenant_id = a.tenant_id AND v.name = a.name AND v.version = a.latest"
    " WHERE a.tenant_id = $1"
)


@dataclass(frozen=True)
class Content:
    """What a version is. `digest`: equal for equal content."""

    config: Mapping[str, Any]
    digest: bytes
    description: str
    metadata: Mapping[str, str]


async def create(db: Database, tenant_id: str, name: str, version_id: str, content: Content) -> None:
    """An agent and its first version. Repeated with the same version id: a no-op. Raises Conflict where the name is
    taken."""

    async def work(connection: asyncpg.Connection) -> None:
        made = await connection.fetchval(
            "INSERT INTO agents (tenant_id, name, latest) VALUES ($1, $2, 1) ON CONFLICT DO NOTHING RETURNING true",
            tenant_id,
            name,
        )
        if made:
            await _add(connection, tenant_id, name, 1, version_id, content)
        elif not await _is_there(connection, version_id):
            raise Conflict(f"there is an agent {name} already; post to /v1/agents/{name}/versions, or use another name")

    await db.run(work)


async def revise(db: Database, tenant_id: str, name: str, version_id: str, content: Content) -> tuple[int, bool]:
    """The version of this content, and whether it was made now: what equals the latest one is that one. Raises
    NotFound, Conflict."""

    async def work(connection: asyncpg.Connection) -> tuple[int, bool]:
        agent = await connection.fetchrow(
            "SELECT latest, archived_at FROM agents WHERE tenant_id = $1 AND name = $2 FOR UPDATE", tenant_id, name
        )
        if agent is None:
            raise NotFound(f"there is no agent {name}")
        made_before = await connection.fetchval(
            "SELECT version FROM agent_versions WHERE version_id = $1 AND tenant_id = $2", version_id, tenant_id
        )
        if made_before is not None:
            return made_before, True
        if agent["archived_at"] is not None:
            raise Conflict(f"the agent {name} is archived; it gets no more versions")
        same = await connection.fetchval(
            "SELECT true FROM agent_versions WHERE tenant_id = $1 AND name = $2 AND version = $3 AND digest = $4",
            tenant_id,
            name,
            agent["latest"],
            content.digest,
        )
        if same:
            return agent["latest"], False
        number = agent["latest"] + 1
        await _add(connection, tenant_id, name, number, version_id, content)
        await connection.execute(
            "UPDATE agents SET latest = $3, updated_at = now() WHERE tenant_id = $1 AND name = $2",
            tenant_id,
            name,
            number,
        )
        return number, True

    return await db.run(work)


async def _is_there(connection: asyncpg.Connection, version_id: str) -> bool:
    return bool(await connection.fetchval("SELECT true FROM agent_versions WHERE version_id = $1", version_id))


async def _add(
    connection: asyncpg.Connection, tenant_id: str, name: str, number: int, version_id: str, content: Content
) -> None:
    await connection.execute(
        "INSERT INTO agent_versions (tenant_id, name, version, version_id, config, digest, description, metadata)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        tenant_id,
        name,
        number,
        version_id,
        dict(content.config),
        content.digest,
        content.description,
        dict(content.metadata),
    )


async def archive(db: Database, tenant_id: str, name: str) -> None:
    """No new sessions from now on; those that there are go on. Idempotent. Raises NotFound."""
    row = await db.fetchrow(
        "UPDATE agents SET archived_at = coalesce(archived_at, now()) WHERE tenant_id = $1 AND name = $2"
        " RETURNING name",
        tenant_id,
        name,
    )
    if row is None:
        raise NotFound(f"there is no agent {name}")


async def get(db: Database, tenant_id: str, name: str) -> asyncpg.Record:
    """With the content of its latest version. Raises NotFound."""
    row = await db.fetchrow(f"{_AGENT} AND a.name = $2", tenant_id, name)
    if row is None:
        raise NotFound(f"there is no agent {name}")
    return row


async def listed(db: Database, tenant_id: str, limit: int, after: str | None, archived: bool) -> list[asyncpg.Record]:
    """By name; one more than `limit` if there are more."""
    return await db.fetch(
        f"{_AGENT} AND ($2::text IS NULL OR a.name > $2) AND ($4 OR a.archived_at IS NULL) ORDER BY a.name LIMIT $3",
        tenant_id,
        after,
        limit + 1,
        archived,
    )


async def versions(db: Database, tenant_id: str, name: str, limit: int, before: int | None) -> list[asyncpg.Record]:
    """Newest first; one more than `limit` if there are more."""
    return await db.fetch(
        "SELECT * FROM agent_versions WHERE tenant_id = $1 AND name = $2 AND ($3::int IS NULL OR version < $3)"
        " ORDER BY version DESC LIMIT $4",
        tenant_id,
        name,
        before,
        limit + 1,
    )


async def version(db: Database, tenant_id: str, name: str, number: int | None = None) -> asyncpg.Record:
    """One version, the latest where none is named, and whether the agent is archived. Raises NotFound."""
    row = await db.fetchrow(
        "SELECT v.*, a.archived_at FROM agents a JOIN agent_versions v USING (tenant_id, name)"
        " WHERE a.tenant_id = $1 AND a.name = $2 AND v.version = coalesce($3::int, a.latest)",
        tenant_id,
        name,
        number,
    )
    if row is None:
        raise NotFound(f"there is no agent {name if number is None else f'{name}@{number}'}")
    return row


async def usable(db: Database, tenant_id: str, name: str, number: int | None) -> asyncpg.Record:
    """A version that a session can be made of. Raises InvalidRequest."""
    try:
        row = await version(db, tenant_id, name, number)
    except NotFound as missing:
        raise InvalidRequest(f"agent: {missing}", param="agent", code="agent_not_found") from None
    if row["archived_at"] is not None:
        raise InvalidRequest(
            f"agent: {name} is archived; no new sessions are made of it", param="agent", code="agent_archived"
        )
    return row


async def made(db: Database, tenant_id: str, version_id: str) -> bool:
    """Whether a request of this id made a version."""
    row = await db.fetchrow(
        "SELECT 1 FROM agent_versions WHERE version_id = $1 AND tenant_id = $2", version_id, tenant_id
    )
    return row is not None
