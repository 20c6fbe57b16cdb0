"""Sessions of every tenant, found by what an operator knows of them; and the installation at a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from runtime.errors import InvalidRequest
from runtime.store.database import Database
from runtime.store.usage import SOURCES

Order = Literal["newest", "oldest"]


@dataclass(frozen=True)
class Filter:
    """All of it holds; None is any. `tier`: where the session's KV was last seen; `text`: a part of its id."""

    states: Sequence[str] | None = None
    tenant_id: str | None = None
    node_id: str | None = None
    model: str | None = None
    older_than_s: float | None = None
    tier: str | None = None
    text: str | None = None

    def conditions(self) -> tuple[str, list[Any]]:
        """FROM and WHERE, and their values: only what is asked for stands in it, so that an index can be used."""
        given: list[tuple[str, Any]] = [
            ("s.state = ANY({})", None if self.states is None else list(self.states)),
            ("s.tenant_id = {}", self.tenant_id),
            ("s.node_id = {}", self.node_id),
            ("s.config ->> 'model' = {}", self.model),
            ("s.created_at < now() - make_interval(secs => {})", self.older_than_s),
            ("strpos(s.session_id, {}) > 0", self.text),
        ]
        asked = [(text, value) for text, value in given if value is not None]
        whole = [text.format(f"${number}") for number, (text, _) in enumerate(asked, 1)]
        if self.tier is not None:  # by its name: plans for a tier with few sessions and for one with many differ
            whole.append(_ON_TIER[self.tier])
        source = "FROM sessions s LEFT JOIN kv_residency k USING (session_id)"
        return f"{source} WHERE {' AND '.join(whole) or 'true'}", [value for _, value in asked]


_ON_TIER: Final[Mapping[str, str]] = {
    "none": "coalesce(k.tier, 'none') = 'none'",
    **{tier: f"k.tier = '{tier}'" for tier in ("device", "host", "nvme", "shared", "external")},
}
_LIVE: Final = "s.state NOT IN ('cancelled', 'completed')"  # as the index of open sessions says it
_OPEN: Final = "s.state NOT IN ('cancelling', 'cancelled', 'completed')"


async def sessions(
    db: Database, wanted: Filter, order: Order, after: str | None, limit: int
) -> Sequence[Mapping[str, Any]]:
    """By the time of their creation. Raises InvalidRequest where `after` is no session."""
    if after is not None and not await db.fetchrow("SELECT true FROM sessions WHERE session_id = $1", after):
        raise InvalidRequest(f"after is {after!r}, which is no session; use the last_id of a page", param="after")
    than, way = ("<", "DESC") if order == "newest" else (">", "ASC")
    matches, values = wanted.conditions()
    place = len(values)
    rows = await db.fetch(
        "SELECT s.session_id, s.tenant_id, s.state, s.waiting_for, s.ending, s.config ->> 'model' AS model, s.node_id,"
        " coalesce(k.tier, 'none') AS tier, s.epoch, s.spent_tokens, s.spent_steps, s.error, s.created_at, s.updated_at"
        f" {matches} AND (${place + 1}::text IS NULL OR (s.created_at, s.session_id) {than}"
        f" (SELECT created_at, session_id FROM sessions WHERE session_id = ${place + 1}))"
        f" ORDER BY s.created_at {way}, s.session_id {way} LIMIT ${place + 2}",
        *values,
        after,
        limit,
    )
    return [dict(row) for row in rows]


async def open_ones(db: Database, wanted: Filter, limit: int) -> list[str]:
    """Those that can be cancelled, oldest first."""
    matches, values = wanted.conditions()
    rows = await db.fetch(
        f"SELECT s.session_id {matches} AND {_OPEN} ORDER BY s.created_at, s.session_id LIMIT ${len(values) + 1}",
        *values,
        limit,
    )
    return [row["session_id"] for row in rows]


async def count_open(db: Database, wanted: Filter) -> int:
    """How many `open_ones` there are."""
    matches, values = wanted.conditions()
    row = await db.fetchrow(f"SELECT count(*) AS found {matches} AND {_OPEN} AND {_LIVE}", *values)
    assert row is not None
    return int(row["found"])


async def tenants_of(db: Database, ids: Sequence[str]) -> dict[str, str]:
    """Of the sessions that there are."""
    rows = await db.fetch("SELECT session_id, tenant_id FROM sessions WHERE session_id = ANY($1)", list(ids))
    return {row["session_id"]: row["tenant_id"] for row in rows}


async def migrations(db: Database) -> list[str]:
    """Versions of the schema that were applied, in their order."""
    return [row["version"] for row in await db.fetch("SELECT version FROM schema_migrations ORDER BY version")]


async def overview(db: Database) -> dict[str, Any]:
    """Sessions by state, what is open and alive, and today's tokens (UTC); of thinks whose account is known."""
    states = await db.fetch("SELECT state, count(*) AS found FROM sessions GROUP BY state ORDER BY state")
    row = await db.fetchrow(
        "SELECT (SELECT count(*) FROM questions WHERE state = 'open') AS questions_open,"
        " (SELECT count(*) FROM sandboxes WHERE state = 'live') AS sandboxes_live,"
        " (SELECT count(*) FROM messages m JOIN sessions s USING (session_id) WHERE m.state = 'accepted'"
        f" AND {_OPEN}) AS messages_waiting"
    )
    tokens = await db.fetchrow(
        f"SELECT coalesce(sum(sampled), 0)::bigint AS sampled,"
        f" {', '.join(f'coalesce(sum({source}), 0)::bigint AS {source}' for source in SOURCES)}"
        " FROM usage WHERE settled_at >= date_trunc('day', now(), 'UTC')"
    )
    assert row is not None
    assert tokens is not None
    return {"sessions": {one["state"]: one["found"] for one in states}, **row, "tokens_today": dict(tokens)}
