"""Numbered SQL, forward only: each file runs once, under one lock, and is never edited afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.resources
from dataclasses import dataclass

import asyncpg

from runtime.errors import MigrationError
from runtime.process import run

LOCK = 0x7E2070  # any number, the same in every release
NO_TRANSACTION = "-- migrate: no-transaction"


@dataclass(frozen=True)
class Migration:
    version: str
    sql: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def packaged_migrations() -> list[Migration]:
    files = importlib.resources.files("migrations").iterdir()
    found = (f for f in files if f.name[:4].isdigit() and f.name.endswith(".sql"))
    return sorted((Migration(f.name[:-4], f.read_text()) for f in found), key=lambda m: m.version)


def pending(known: list[Migration], applied: dict[str, str]) -> list[Migration]:
    """What is still to run. Raises MigrationError if the database is ahead, or a file changed after it ran."""
    by_version = {m.version: m for m in known}
    if ahead := sorted(set(applied) - set(by_version)):
        raise MigrationError(
            f"the database has migrations {', '.join(ahead)} that this release does not know; upgrade tenuto-server"
        )
    for version, sha256 in applied.items():
        if by_version[version].sha256 != sha256:
            raise MigrationError(f"migration {version} was edited after it ran; restore the released file")
    return [m for m in known if m.version not in applied]


async def check_schema(dsn: str) -> None:
    """That `migrate` could bring this database up to date; changes nothing. Raises MigrationError."""
    connection = await asyncpg.connect(dsn)
    try:
        if await connection.fetchval("SELECT to_regclass('schema_migrations')") is not None:
            pending(packaged_migrations(), await _applied(connection))
    finally:
        await connection.close()


async def migrate(dsn: str, migrations: list[Migration] | None = None) -> list[str]:
    """Apply what is pending and return the versions applied. Safe to run from several processes at once."""
    known = packaged_migrations() if migrations is None else migrations
    connection = await asyncpg.connect(dsn)
    try:
        # A try-lock in a loop: a session that blocks on the lock would hold a snapshot, and
        # CREATE INDEX CONCURRENTLY waits for every snapshot.
        while not await connection.fetchval("SELECT pg_try_advisory_lock($1)", LOCK):
            await asyncio.sleep(0.1)
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS schema_migrations (version text PRIMARY KEY, sha256 text NOT NULL,"
            " applied_at timestamptz NOT NULL DEFAULT now())"
        )
        todo = pending(known, await _applied(connection))
        for migration in todo:
            await _apply(connection, migration)
        return [m.version for m in todo]
    finally:
        await connection.close()


async def _applied(connection: asyncpg.Connection) -> dict[str, str]:
    rows = await connection.fetch("SELECT version, sha256 FROM schema_migrations")
    return {row["version"]: row["sha256"] for row in rows}


async def _apply(connection: asyncpg.Connection, migration: Migration) -> None:
    record = "INSERT INTO schema_migrations (version, sha256) VALUES ($1, $2)"
    if migration.sql.startswith(NO_TRANSACTION):
        await connection.execute(migration.sql)
        await connection.execute(record, migration.version, migration.sha256)
        return
    async with connection.transaction():
        await connection.execute(migration.sql)
        await connection.execute(record, migration.version, migration.sha256)


async def _main() -> None:
    from runtime.settings import Settings

    applied = await migrate(Settings.load().postgres_dsn_required)
    print("applied: " + (", ".join(applied) or "nothing, the schema is current"))


if __name__ == "__main__":
    run(_main())
