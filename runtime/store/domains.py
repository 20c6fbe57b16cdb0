"""Sharing domains of KV: the salt that a session's pages are keyed with, for as long as the domain has a session."""

from __future__ import annotations

import secrets
from typing import Literal

import asyncpg

Share = Literal["tenant", "session"]


def domain_of(tenant_id: str, session_id: str, share: Share, encrypted: bool) -> str | None:
    """The domain of a new session. A tenant's sessions share its salt for ever, unless tiers are encrypted: then they
    share one that ends with the last of them."""
    if share == "session":
        return f"session:{session_id}"
    return f"tenant:{tenant_id}" if encrypted else None


async def ensure(connection: asyncpg.Connection, tenant_id: str, domain_id: str) -> None:
    """Make the domain if there is none, and keep it until this transaction ends."""
    while True:
        await connection.execute(
            "INSERT INTO kv_domains (domain_id, tenant_id, salt) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
            domain_id,
            tenant_id,
            secrets.token_bytes(32),
        )
        held = await connection.fetchval("SELECT 1 FROM kv_domains WHERE domain_id = $1 FOR SHARE", domain_id)
        if held is not None:
            return


async def end_unused(connection: asyncpg.Connection, session_id: str) -> None:
    """The domain of a session that has ended goes, if no open session is in it: its salt is gone for good."""
    domain_id = await connection.fetchval("SELECT kv_domain FROM sessions WHERE session_id = $1", session_id)
    if domain_id is None:
        return
    await connection.fetchval("SELECT 1 FROM kv_domains WHERE domain_id = $1 FOR UPDATE", domain_id)
    await connection.execute(
        "DELETE FROM kv_domains WHERE domain_id = $1 AND NOT EXISTS (SELECT FROM sessions"
        " WHERE kv_domain = $1 AND state NOT IN ('cancelled', 'completed'))",
        domain_id,
    )
