from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from engine.tokens import ChatFormat, PublishedChat, Tokenizer, load_chat_format, publish_chat, read_chat
from runtime.api import make_app
from runtime.api.chats import Chats
from runtime.embedded import PostgresServer
from runtime.home import make_secrets_key
from runtime.settings import Settings
from runtime.store import Database, chats, fleet
from sandbox.bubblewrap import why_not
from tests.conftest import make_database
from tests.runtime.api.house import House, open_house

KEY = "tk_test"
CARD = {"model": "smollm2-135m-instruct", "context_length": 8192, "vocab_size": 49152, "fingerprint": "00"}


@cache
def published_chat(model_path: Path) -> PublishedChat:
    return publish_chat(*load_chat_format(model_path))


@cache
def read_once(published: PublishedChat) -> tuple[Tokenizer, ChatFormat]:
    return read_chat(published)


class KnownChats(Chats):
    """As the API's, but that each test does not read again what one before it has read."""

    def __init__(self, published: PublishedChat) -> None:
        super().__init__()
        self._published = published

    async def _found(self, db: Database, digest: str) -> tuple[Tokenizer, ChatFormat]:
        return read_once(self._published) if digest == self._published.digest else await super()._found(db, digest)


@pytest.fixture
async def app(dsn: str, temporal_address: str, model_path: Path, tmp_path: Path) -> AsyncIterator[FastAPI]:
    """The application over a real Postgres and Temporal, with a node announced that serves the test model."""
    settings = Settings.load(
        {},
        {
            "TENUTO_HOME": str(tmp_path),
            "TENUTO_POSTGRES_DSN": dsn,
            "TENUTO_TEMPORAL_ADDRESS": temporal_address,
        },
    )
    settings.admin_key_path.write_text(KEY)
    make_secrets_key(settings.secrets_key_path)
    published = published_chat(model_path)
    async with Database(dsn) as db:
        await chats.publish(db, published.digest, published.data)
        await fleet.register_node(db, "n", "b", "q", CARD, {}, chat=published.digest)
    app = make_app(settings)
    async with app.router.lifespan_context(app):
        app.state.chats = KnownChats(published)
        yield app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {KEY}"}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def house(house_of_the_run: House) -> House:
    """Its node beats only while tests of its loop run, so it does before each of them."""
    await fleet.heartbeat(house_of_the_run.db, "n", "b")
    return house_of_the_run


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def house_of_the_run(postgres_server: PostgresServer, temporal_address: str) -> AsyncIterator[House]:
    """The API with a worker and a node behind it, once for the run."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="tenuto-house-", dir="/tmp") as folder:
        home, node_home = Path(folder) / "home", Path(folder) / "node"
        for one in (Path(folder), home, node_home):  # as root, sandboxes are other users
            one.mkdir(exist_ok=True)
            one.chmod(0o755)
        async for dsn in make_database(postgres_server, "TEMPLATE template_migrated"):
            async with open_house(dsn, temporal_address, home, node_home) as opened:
                yield opened
