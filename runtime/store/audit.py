"""The log of what operators changed: appended only, in the transaction of the change where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from runtime.store.database import Database


@dataclass(frozen=True)
class Act:
    """Who does what, with which request."""

    tenant_id: str
    key_id: str
    action: str
    request_id: str


async def note(
    source: Database | asyncpg.Connection,
    act: Act,
    target: str | None,
    outcome: str = "done",
    detail: Mapping[str, Any] | None = None,
) -> None:
    """`target`: the id of what was acted on; `outcome`: done, refused or failed."""
    await source.execute(
        "INSERT INTO admin_actions (tenant_id, key_id, action, target, request_id, outcome, detail)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7)",
        act.tenant_id,
        act.key_id,
        act.action,
        target,
        act.request_id,
        outcome,
        dict(detail or {}),
    )


async def listed(
    db: Database,
    *,
    key_id: str | None,
    action: str | None,
    target: str | None,
    outcome: str | None,
    before: int | None,
    limit: int,
) -> Sequence[dict[str, Any]]:
    """Newest first."""
    rows = await db.fetch(
        "SELECT * FROM admin_actions WHERE ($1::text IS NULL OR key_id = $1) AND ($2::text IS NULL OR action = $2)"
        " AND ($3::text IS NULL OR target = $3) AND ($4::text IS NULL OR outcome = $4)"
        " AND ($5::bigint IS NULL OR action_id < $5) ORDER BY action_id DESC LIMIT $6",
        key_id,
        action,
        target,
        outcome,
        before,
        limit,
    )
    return [dict(row) for row in rows]
