from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from engine.tokens import PublishedChat, load_chat_format, publish_chat
from runtime.api import make_app
from runtime.home import make_secrets_key
from runtime.settings import Settings
from runtime.store import Database, chats, fleet

KEY = "tk_test"
CARD = {"model": "smollm2-135m-instruct", "context_length": 8192, "fingerprint": "00"}


@cache
def published_chat(model_path: Path) -> PublishedChat:
    return publish_chat(*load_chat_format(model_path))


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
        yield app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {KEY}"}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client
