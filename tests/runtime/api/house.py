"""The API with a worker and a node, in this process; its sandboxes are real, and its engine has a tiny random model."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from google.protobuf.duration_pb2 import Duration
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError

from engine.tokens import load_chat_format, publish_chat
from runtime.api import make_app
from runtime.engines import EngineLink
from runtime.home import make_secrets_key
from runtime.node import serving
from runtime.sealing import Sealer
from runtime.settings import Settings
from runtime.steps.blob_lock import BlobLock
from runtime.steps.resting import usual_spec
from runtime.steps.services import Services
from runtime.store import Database, chats, fleet
from runtime.worker import make_worker
from sandbox import BlobStore, Budget, Pool
from sandbox.bubblewrap import BubblewrapDriver
from tests.engine.conftest import share_native
from tests.engine.process import Process
from tests.engine.process import engine as engine_process
from tests.engine.tiny import write_tiny
from tests.runtime.tools.conftest import LIBRARIES
from workflows.contract import node_queue

KEY = "tk_test"


@dataclass
class House:
    """A user's client, and what stands behind it."""

    app: FastAPI
    client: httpx.AsyncClient
    db: Database
    services: Services
    other: httpx.AsyncClient  # of another tenant
    engine: Process

    async def session(self, **config: Any) -> str:
        answer = await self.client.post("/v1/sessions", json=config)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def events(self, session_id: str) -> list[str]:
        found = await self.client.get(f"/v1/sessions/{session_id}/events", params={"limit": 1000})
        return [event["type"] for event in found.json()["data"]]


@contextlib.asynccontextmanager
async def open_house(dsn: str, temporal: str, home: Path, node_home: Path) -> AsyncIterator[House]:
    namespace = await _namespace(temporal)
    settings = Settings.load(
        {},
        {
            "TENUTO_HOME": str(home),
            "TENUTO_POSTGRES_DSN": dsn,
            "TENUTO_TEMPORAL_ADDRESS": temporal,
            "TENUTO_TEMPORAL_NAMESPACE": namespace,
        },
    )
    settings.admin_key_path.write_text(KEY)
    make_secrets_key(settings.secrets_key_path)
    share_native(node_home)
    model = write_tiny(node_home / "tiny.gguf", llama__context_length=8192)
    tokenizer, chat = load_chat_format(model)
    driver = await BubblewrapDriver.open(node_home, home / "run")
    sealer = Sealer(settings.secrets_key_bytes)
    pool = Pool(driver, usual_spec((LIBRARIES,)), Budget(most=0))
    blobs, lock = BlobStore(settings.blobs_dir), BlobLock(settings.blobs_lock_path)
    app = make_app(settings)
    async with (
        Database(dsn) as db,
        engine_process(model, node_home, kv_tokens=65536) as process,
        EngineLink(str(process.socket)) as engine,
    ):
        await engine.ready(timeout_s=60)
        services = Services(
            "n", "b", db, engine, tokenizer, chat, driver, blobs, (LIBRARIES,), lock, pool, sealer=sealer
        )
        described = {"backend": "bubblewrap", "isolation": driver.isolation, "limits": {}, "notes": [], "pool": {}}
        published = publish_chat(tokenizer, chat)
        await chats.publish(db, published.digest, published.data)
        queue = node_queue("n", "b")
        await fleet.register_node(db, "n", "b", queue, engine.card.as_message(), described, chat=published.digest)
        client = await Client.connect(temporal, namespace=namespace)
        async with (
            app.router.lifespan_context(app),
            make_worker(client, deployment_config=None),
            serving(client, services),
            _beating(services),
            _client(app, KEY) as user,
            _client(app, await _another_tenant(db)) as other,
        ):
            yield House(app, user, db, services, other, process)
        await driver.reap([])


def _client(app: FastAPI, key: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, timeout=60)


async def _another_tenant(db: Database) -> str:
    key = "tk_other"
    await db.execute("INSERT INTO tenants (tenant_id, salt) VALUES ('other', sha256('other'))")
    await db.execute(
        "INSERT INTO api_keys (key_id, tenant_id, sha256, scope) VALUES ('k', 'other', sha256($1), 'use')", key.encode()
    )
    return key


@contextlib.asynccontextmanager
async def _beating(services: Services) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            await fleet.heartbeat(services.db, "n", "b")
            await asyncio.sleep(1)

    await fleet.heartbeat(services.db, "n", "b")  # whatever it took to get here
    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _namespace(address: str) -> str:
    """One of its own: what other tests left in Temporal is nobody's here."""
    name = f"house-{uuid.uuid4().hex[:8]}"
    client = await Client.connect(address)
    keep = Duration()
    keep.FromTimedelta(datetime.timedelta(days=1))
    asked = RegisterNamespaceRequest(namespace=name, workflow_execution_retention_period=keep)
    await client.workflow_service.register_namespace(asked)
    inside = await Client.connect(address, namespace=name)
    while True:
        with contextlib.suppress(RPCError):
            await inside.count_workflows("")
            return name
        await asyncio.sleep(0.1)
