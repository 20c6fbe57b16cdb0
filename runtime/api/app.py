"""The application: routes, guards, and what it holds open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import Depends, FastAPI, Response

from runtime import console, prices
from runtime.api import (
    admin,
    admin_attention,
    admin_doctor,
    admin_kv,
    admin_sessions,
    agents,
    approvals,
    audit,
    changes,
    commands,
    completions,
    conversations,
    documented,
    exporting,
    files,
    following,
    importing,
    intents,
    keys,
    metrics,
    models,
    outputs,
    plan,
    problems,
    queries,
    responses,
    schedules,
    secrets,
    sessions,
    tenants,
    usage,
    webhooks,
)
from runtime.api.acting import Noted
from runtime.api.chats import Chats
from runtime.api.counts import Counted, Counts
from runtime.api.documented import Shape
from runtime.api.feeds import Hub
from runtime.api.guard import Authenticated, Db, Guard
from runtime.api.on_behalf import OnBehalf
from runtime.api.request_id import RequestIds
from runtime.errors import Unavailable
from runtime.process import connect_temporal
from runtime.sealing import Sealer
from runtime.settings import Settings
from runtime.store import Database, fleet
from runtime.tools.egress import Egress
from sandbox import BlobStore

ROUTERS = (
    importing.router,  # before what takes any name for a session's
    sessions.router,
    exporting.router,
    commands.router,
    approvals.router,
    files.router,
    changes.router,
    intents.router,
    outputs.router,
    agents.router,
    secrets.router,
    webhooks.router,
    schedules.router,
    models.router,
    responses.router,
    conversations.router,
    completions.router,
    plan.router,
    admin.router,
    admin_kv.router,
    admin_doctor.router,
    admin_attention.router,
    metrics.router,
    keys.router,
    keys.admin_router,
    tenants.router,
    admin_sessions.router,
    audit.router,
    usage.router,
    usage.admin_router,
)


def make_app(settings: Settings) -> FastAPI:
    """Raises StartupError where the price file is none."""
    price_list = prices.load(settings.prices)
    counts = Counts()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Database(settings.postgres_dsn_required, patience_s=20.0, size=16) as db:
            app.state.db = db
            app.state.settings = settings
            app.state.prices = price_list
            app.state.temporal = await connect_temporal(settings)
            app.state.chats = Chats()
            app.state.counts = counts
            app.state.hub = Hub(db, counts)
            app.state.sending = set()
            app.state.followed = set()
            app.state.blobs = BlobStore(settings.blobs_dir)  # those that a node of this machine has
            app.state.kv_encryption = settings.kv_encryption == "on"
            app.state.sealer = Sealer(settings.secrets_key_bytes)
            app.state.egress = Egress(settings.egress_allow)
            app.state.sandbox_egress = settings.sandbox_egress_allow
            app.state.sandbox_images = settings.sandbox_images
            await fleet.ensure_admin(db, settings.admin_key)
            listening = asyncio.create_task(app.state.hub.run())
            tending = asyncio.create_task(following.tend(app))
            try:
                yield
            finally:
                for task in (listening, tending, *app.state.sending):
                    task.cancel()
                await asyncio.gather(listening, tending, *app.state.sending, return_exceptions=True)

    app = FastAPI(
        title="Tenuto",
        version="0.1.0",
        description="Agent sessions that are durable, with a sandbox each, whose KV waits while their tools run.",
        lifespan=lifespan,
        openapi_url="/v1/openapi.json",
        docs_url=None,  # such pages would have the browser load scripts from elsewhere
        redoc_url=None,
        dependencies=[Depends(queries.only_known)],
        generate_unique_id_function=documented.name_of,
    )
    app.add_middleware(OnBehalf)
    app.add_middleware(Noted)
    app.add_middleware(Authenticated)  # whichever is added later sees a request earlier
    app.add_middleware(Guard)
    app.add_middleware(RequestIds)
    app.add_middleware(Counted, counts=counts)
    problems.install(app)
    for router in ROUTERS:
        app.include_router(router)
    _health(app)
    documented.describe(app)
    console.install(app, settings)
    return app


class Alive(Shape):
    status: Literal["ok"] = "ok"


class Readiness(Shape):
    """`checks`: what is needed, and ok or what is wrong with it."""

    status: Literal["ready", "not ready"]
    checks: dict[str, str]


def _health(app: FastAPI) -> None:
    @app.get("/healthz", tags=["health"])
    async def healthz() -> Alive:
        """This process answers."""
        return Alive()

    @app.get("/readyz", tags=["health"], response_model=Readiness, responses={503: {"model": Readiness}})
    async def readyz(db: Db, response: Response) -> dict[str, Any]:
        """Whether a session could be run now, and what is missing if not."""
        checks: dict[str, str] = {}
        try:
            alive = [node["node_id"] for node in await fleet.nodes(db) if node["alive"]]
            checks["postgres"] = "ok"
            checks["nodes"] = "ok" if alive else "no node is up"
        except Unavailable as error:
            checks["postgres"] = str(error)
        try:
            await asyncio.wait_for(app.state.temporal.service_client.check_health(), 2)
            checks["temporal"] = "ok"
        except Exception as error:
            checks["temporal"] = f"does not answer: {error}"
        ready = all(state == "ok" for state in checks.values())
        response.status_code = 200 if ready else 503
        return {"status": "ready" if ready else "not ready", "checks": checks}
