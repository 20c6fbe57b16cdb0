import asyncpg
import pytest


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress"),
        asyncpg.InterfaceError("connection is closed"),
        ConnectionResetError(),
        asyncpg.SerializationError(),
    ],
)
async def test_work_is_done_again_when_its_connection_broke_however_that_showed(db, error):
    failures = [error]

    async def work(connection):
        if failures:
            raise failures.pop()
        return await connection.fetchval("SELECT 7")

    assert await db.run(work) == 7
