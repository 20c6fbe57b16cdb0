"""A pool that outlives its server: work is repeated when the connection is lost, so it must be safe to repeat."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

import asyncpg

from runtime.errors import Unavailable
from runtime.text import as_jsonb

T = TypeVar("T")

_LOST = (
    OSError,
    asyncio.TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # "another operation is in progress": the server died in the middle of one
    asyncpg.TooManyConnectionsError,  # those of a client that died are still being closed
)
_COLLIDED = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)


class Database:
    """A connection pool. `patience_s`: how long work waits for a server that is away before `Unavailable`.

    `idle_s`: how long the server keeps a transaction whose client says nothing. Whoever is stopped, or away without a
    word as a host without power is, would else hold the lock of its session for hours.
    """

    def __init__(self, dsn: str, *, size: int = 8, patience_s: float = 60.0, idle_s: float = 10.0) -> None:
        self.dsn = dsn
        self._size = size
        self._patience_s = patience_s
        self._settings = {
            "idle_in_transaction_session_timeout": f"{idle_s * 1000:.0f}ms",
            "plan_cache_mode": "force_generic_plan",  # rows are found by key: no value calls for a plan of its own
        }
        self._pool: asyncpg.Pool | None = None

    async def __aenter__(self) -> Self:
        self._pool = await asyncpg.create_pool(
            self.dsn,
            min_size=0,
            max_size=self._size,
            init=_set_codecs,
            reset=_as_it_is,
            command_timeout=30,
            timeout=10,
            server_settings=self._settings,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.terminate()

    async def run(self, work: Callable[[asyncpg.Connection], Awaitable[T]], *, patience_s: float | None = None) -> T:
        """`work` in one transaction. A lost connection leaves it open whether the commit happened, hence the
        rule that work must notice that it was already done."""

        async def whole(connection: asyncpg.Connection) -> T:
            async with connection.transaction():
                return await work(connection)

        return await self._repeated(whole, patience_s)

    async def fetch(self, sql: str, *args: Any, patience_s: float | None = None) -> list[asyncpg.Record]:
        """One statement is a transaction by itself, and needs no more than one round trip."""
        return await self._repeated(lambda c: c.fetch(sql, *args), patience_s)

    async def fetchrow(self, sql: str, *args: Any) -> asyncpg.Record | None:
        return await self._repeated(lambda c: c.fetchrow(sql, *args))

    async def execute(self, sql: str, *args: Any) -> None:
        await self._repeated(lambda c: c.execute(sql, *args))

    async def _repeated(self, work: Callable[[asyncpg.Connection], Awaitable[T]], patience_s: float | None = None) -> T:
        assert self._pool is not None, "open the database with `async with`"
        deadline = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        pause = 0.05
        while True:
            try:
                async with self._pool.acquire() as connection:
                    return await work(connection)
            except (*_LOST, *_COLLIDED) as error:
                if time.monotonic() + pause > deadline:
                    raise Unavailable(f"Postgres does not answer: {error}") from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)


async def _as_it_is(connection: asyncpg.Connection) -> None:
    """Nobody leaves anything on a connection that a round trip would have to clear."""


async def _set_codecs(connection: asyncpg.Connection) -> None:
    await connection.set_type_codec("jsonb", encoder=as_jsonb, decoder=json.loads, schema="pg_catalog")
