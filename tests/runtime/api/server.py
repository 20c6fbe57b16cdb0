"""`tenuto api` as a process of its own, over a database that is made for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import httpx

from runtime.embedded import PostgresServer
from runtime.home import make_secrets_key
from runtime.settings import Settings
from runtime.store import Database, chats, fleet
from tests.conftest import dsn_of
from tests.runtime.api.conftest import CARD, KEY, published_chat

_READY_WITHIN_S = 120.0


@dataclass(frozen=True)
class Served:
    url: str
    dsn: str
    pid: int

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEY}"}


@contextlib.contextmanager
def api_process(postgres: PostgresServer, temporal_address: str, model_path: Path) -> Iterator[Served]:
    """It answers, a node that serves the test model is announced, and no worker runs: sessions rest where they are."""
    dsn = dsn_of(postgres, f"test_{uuid.uuid4().hex}")
    with tempfile.TemporaryDirectory(prefix="tenuto-test-") as home, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        given = {
            "TENUTO_HOME": home,
            "TENUTO_POSTGRES_DSN": dsn,
            "TENUTO_TEMPORAL_ADDRESS": temporal_address,
            "TENUTO_API_PORT": str(port),
        }
        (Path(home) / "admin.key").write_text(KEY)
        make_secrets_key(Path(home) / "secrets.key")
        asyncio.run(_prepare(postgres, dsn, model_path))
        environment = {**Settings.load({}, given).environment(), "PYTHONPATH": ":".join(sys.path)}
        process = subprocess.Popen([sys.executable, "-m", "runtime.api"], env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            _until_ready(url, process)
            yield Served(url, dsn, process.pid)
        finally:
            process.terminate()
            process.wait()
            asyncio.run(_drop(postgres, dsn))


async def _prepare(postgres: PostgresServer, dsn: str, model_path: Path) -> None:
    connection = await asyncpg.connect(postgres.dsn)
    await connection.execute(f"CREATE DATABASE {_name(dsn)} TEMPLATE template_migrated")
    await connection.close()
    published = published_chat(model_path)
    async with Database(dsn) as db:
        await chats.publish(db, published.digest, published.data)
        await fleet.register_node(db, "n", "b", "q", CARD, {}, chat=published.digest)
        # Nobody beats for it, and it must be there for as long as the tests take.
        await db.execute("UPDATE nodes SET heartbeat_at = now() + interval '1 day'")


async def _drop(postgres: PostgresServer, dsn: str) -> None:
    connection = await asyncpg.connect(postgres.dsn)
    await connection.execute(f"DROP DATABASE {_name(dsn)} WITH (FORCE)")
    await connection.close()


def _name(dsn: str) -> str:
    return dsn.partition("?")[0].rpartition("/")[2]


def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/healthz").is_success:
                return
        time.sleep(0.05)
    raise AssertionError(f"the API did not start (exit status {process.poll()})")
