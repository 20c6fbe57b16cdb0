"""Work is repeated when its connection is lost, in whatever words the driver says so."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from runtime.store import Database


@pytest.mark.parametrize(
    "lost",
    [
        ConnectionResetError("gone"),
        asyncpg.AdminShutdownError("going"),
        asyncpg.InterfaceError("connection is closed"),
        asyncpg.SerializationError(),
        asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress"),
        asyncpg.TooManyConnectionsError("sorry, too many clients already"),
    ],
)
async def test_work_whose_connection_was_lost_is_done_again(dsn: str, lost: Exception) -> None:
    tries = []

    async def work(connection: asyncpg.Connection) -> int:
        tries.append(connection)
        if len(tries) == 1:
            raise lost
        return int(await connection.fetchval("SELECT 7"))

    async with Database(dsn) as db:
        assert await db.run(work) == 7
    assert len(tries) == 2


async def test_work_that_fails_by_itself_is_not_done_again(dsn: str) -> None:
    async with Database(dsn) as db:
        with pytest.raises(asyncpg.UndefinedTableError):
            await db.execute("SELECT * FROM nothing_of_this_name")


async def test_who_falls_silent_in_a_transaction_holds_its_lock_for_no_longer_than_agreed(dsn: str) -> None:
    locked, freed = asyncio.Event(), asyncio.Event()
    tries = []

    async def silent(connection: asyncpg.Connection) -> None:
        tries.append(connection)
        await connection.execute("LOCK TABLE sessions")
        locked.set()
        await freed.wait()
        await connection.execute("SELECT 1")

    async with Database(dsn, idle_s=0.1) as first, Database(dsn) as second:
        silence = asyncio.create_task(first.run(silent))
        await locked.wait()
        await second.run(lambda c: c.execute("LOCK TABLE sessions"))
        freed.set()
        await silence
    assert len(tries) == 2
