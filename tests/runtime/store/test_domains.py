"""Sharing domains: whose salt a session's pages are keyed with, and when it is gone."""

from __future__ import annotations

import asyncio

import pytest

from runtime.store import Database, fleet, sessions
from runtime.store.domains import domain_of
from tests.runtime.store.conftest import CONFIG

TENANT = fleet.DEFAULT_TENANT


async def made(db: Database, name: str, domain: str | None) -> bytes:
    """The salt of a new session."""
    await fleet.ensure_admin(db, "key")
    await sessions.create(db, TENANT, name, CONFIG, 1, domain=domain)
    return (await sessions.get(db, name)).salt


async def domains(db: Database) -> list[str]:
    return [row["domain_id"] for row in await db.fetch("SELECT domain_id FROM kv_domains ORDER BY 1")]


@pytest.mark.parametrize(
    ("share", "encrypted", "domain"),
    [
        ("tenant", False, None),
        ("tenant", True, "tenant:t"),
        ("session", False, "session:s"),
        ("session", True, "session:s"),
    ],
)
def test_a_session_says_whom_it_shares_with(share: str, encrypted: bool, domain: str | None) -> None:
    assert domain_of("t", "s", share, encrypted) == domain  # type: ignore[arg-type]


async def test_without_a_domain_the_tenants_salt_is_used_for_ever(db: Database) -> None:
    first = await made(db, "a", None)
    await sessions.finish(db, "a", "cancelled", {})
    assert await made(db, "b", None) == first
    assert await domains(db) == []


async def test_a_domain_ends_with_its_last_session_and_its_salt_never_comes_back(db: Database) -> None:
    first = await made(db, "a", "tenant:t")
    assert await made(db, "b", "tenant:t") == first
    await sessions.finish(db, "a", "cancelled", {})
    assert await domains(db) == ["tenant:t"]
    assert (await sessions.get(db, "b")).salt == first
    await sessions.finish(db, "b", "cancelled", {})
    assert await domains(db) == []
    assert await made(db, "c", "tenant:t") not in (first, await made(db, "plain", None))


async def test_sessions_of_their_own_share_with_nobody(db: Database) -> None:
    salts = [await made(db, name, f"session:{name}") for name in ("a", "b")]
    assert len({*salts, await made(db, "plain", None)}) == 3


async def test_a_domain_that_is_joined_while_it_ends_is_whole(db: Database) -> None:
    for number in range(10):
        await made(db, f"old{number}", "tenant:t")
        await asyncio.gather(
            sessions.finish(db, f"old{number}", "cancelled", {}),
            sessions.create(db, TENANT, f"new{number}", CONFIG, 1, domain="tenant:t"),
        )
        joined = await db.fetchrow(
            "SELECT d.salt FROM sessions s JOIN kv_domains d ON d.domain_id = s.kv_domain WHERE session_id = $1",
            f"new{number}",
        )
        assert joined is not None
        await sessions.finish(db, f"new{number}", "cancelled", {})
        assert await domains(db) == []
