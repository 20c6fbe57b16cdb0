import asyncio

import asyncpg
import pytest

from runtime.errors import MigrationError
from runtime.migrate import Migration, migrate, packaged_migrations, pending


async def test_several_runners_at_once_apply_each_migration_once(empty_dsn):
    applied = await asyncio.gather(*(migrate(empty_dsn) for _ in range(4)))
    assert sorted(applied, key=len)[-1] == [m.version for m in packaged_migrations()]
    assert sum(len(versions) for versions in applied) == len(packaged_migrations())
    assert await migrate(empty_dsn) == []


async def test_a_migration_that_fails_leaves_nothing_behind(empty_dsn):
    broken = [Migration("0001_a", "CREATE TABLE a (x int)"), Migration("0002_b", "CREATE TABLE b (x int); SELECT 1/0")]
    with pytest.raises(asyncpg.DivisionByZeroError):
        await migrate(empty_dsn, broken)
    mended = [broken[0], Migration("0002_b", "CREATE TABLE b (x int)")]
    assert await migrate(empty_dsn, mended) == ["0002_b"]


async def test_an_index_can_be_built_without_a_transaction(empty_dsn):
    steps = [
        Migration("0001_a", "CREATE TABLE a (x int)"),
        Migration("0002_i", "-- migrate: no-transaction\nCREATE INDEX CONCURRENTLY i ON a (x)"),
    ]
    assert await migrate(empty_dsn, steps) == ["0001_a", "0002_i"]


def test_an_edited_migration_is_refused():
    with pytest.raises(MigrationError, match="0001_a was edited after it ran"):
        pending([Migration("0001_a", "new text")], {"0001_a": Migration("0001_a", "old text").sha256})


def test_a_database_from_a_newer_release_is_refused():
    with pytest.raises(MigrationError, match="upgrade tenuto-server"):
        pending([], {"0009_future": "00"})


async def test_every_table_of_tenants_names_its_tenant(db):
    """Tables of the installation itself are the only ones without."""
    rows = await db.fetch(
        "SELECT table_name, bool_or(column_name = 'tenant_id' AND is_nullable = 'NO') AS named"
        " FROM information_schema.columns WHERE table_schema = 'public' GROUP BY table_name"
    )
    without = {row["table_name"] for row in rows if not row["named"]}
    assert without == {"chat_formats", "nodes", "sandbox_spares", "schema_migrations", "session_transitions"}
