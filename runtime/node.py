"""`tenuto node`: runs the steps. It holds activities and sandboxes, and talks to the engine that holds the pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.worker import Interceptor, Worker

from engine import EngineError
from engine.tokens import ChatFormat, Tokenizer, byte_chat, load_chat_format, publish_chat
from runtime import delivery, kv_audit, schedules, webhooks
from runtime.draining import Drain
from runtime.engines import EngineLink
from runtime.kv_log import drain_forever
from runtime.process import announce_ready, connect_temporal, run, settle, start_logging, until_stopped
from runtime.sealing import Sealer
from runtime.settings import Settings
from runtime.steps import Services, Steps
from runtime.steps.blob_lock import BlobLock
from runtime.steps.closing import free_pages
from runtime.steps.collecting import collect_all
from runtime.steps.leaving import Watched
from runtime.steps.resting import SpareBook, release_idle, usual_spec
from runtime.steps.sharing import share_at_rest
from runtime.store import Database, chats, errands, fleet, retention, sandboxes
from runtime.tools.egress import Egress
from sandbox import BlobStore, Budget, Driver, Pool, choose_driver
from workflows.contract import NODES_QUEUE, THINK, node_queue

log = logging.getLogger(__name__)

REAP_EVERY_S = 30.0
REST_EVERY_S = 5.0
SWEEP_EVERY_S = 3600.0
BEAT_EVERY_S = 1.0
ENGINE_SILENT_S = 8.0


async def serve(settings: Settings) -> None:
    start_logging(settings.log_level)
    boot = secrets.token_hex(6)
    sealer = Sealer(settings.secrets_key_bytes)
    driver = await choose_driver(
        settings.home,
        settings.run_dir,
        None if settings.sandbox == "auto" else settings.sandbox,
        pull=settings.sandbox_pull == "missing",
    )
    tokenizer, chat = await asyncio.to_thread(_chat, settings)
    async with (
        Database(settings.postgres_dsn_required) as db,
        EngineLink(settings.engine_address_required) as engine,
    ):
        client = await connect_temporal(settings)
        services = Services(
            node_id=settings.node_id,
            boot=boot,
            db=db,
            engine=engine,
            tokenizer=tokenizer,
            chat=chat,
            driver=driver,
            blobs=BlobStore(settings.blobs_dir),
            volumes=settings.sandbox_volumes,
            pool=Pool(
                driver,
                usual_spec(settings.sandbox_volumes),
                Budget(cold_start_s=settings.sandbox_cold_start_s, most=settings.sandbox_spares),
                SpareBook(db, settings.node_id, boot),
            ),
            egress=Egress(settings.egress_allow),
            sandbox_egress=settings.sandbox_egress_allow,
            temporal=client,
            blob_lock=BlobLock(settings.blobs_lock_path),
            sealer=sealer,
            kv_encryption=settings.kv_encryption == "on",
            shares=settings.shared_kv is not None,
        )
        await sandboxes.forget_spares(db, settings.node_id, boot)
        await reap(db, driver)
        await collect_all(services)
        await engine.ready(timeout_s=600)
        await _collect_pages(db, engine)
        await _register(services, settings)
        drain = Drain(services, client)
        async with _background(
            _beat(services, drain),
            _reap_forever(services),
            _rest_forever(services, settings.sandbox_idle_s),
            delivery.reconcile_forever(client, db),
            webhooks.hand_over_forever(client, db),
            schedules.reconcile_forever(client, db),
            drain_forever(engine, db),
            _sweep_forever(db, settings.retention_days),
        ):
            async with services.pool, serving(client, services):
                settle()
                announce_ready(node=settings.node_id, boot=boot, sandbox=driver.name, isolation=driver.isolation)
                await until_stopped()
                await drain.on_the_way_out()


def _chat(settings: Settings) -> tuple[Tokenizer, ChatFormat]:
    """The model's own, or, for a model server, that of transcripts of bytes. Blocking."""
    return byte_chat() if settings.external is not None else load_chat_format(settings.model_path, settings.call_format)


async def _register(s: Services, settings: Settings) -> None:
    queue = node_queue(s.node_id, s.boot)
    card = s.engine.card.as_message()
    address = settings.engine_address_required
    published = await asyncio.to_thread(publish_chat, s.tokenizer, s.chat)
    await chats.publish(s.db, published.digest, published.data)
    await fleet.register_node(s.db, s.node_id, s.boot, queue, card, await _sandboxes(s), address, published.digest)


async def reap(db: Database, driver: Driver) -> list[str]:
    """Remove every sandbox of this machine that no open session holds and no node keeps ready; returns their ids."""
    await db.execute(
        "UPDATE sandboxes b SET state = 'released', released_at = now() FROM sessions s"
        " WHERE b.session_id = s.session_id AND b.state <> 'released' AND s.state IN ('cancelled', 'completed')"
    )
    found = await driver.found()  # before the record is asked: what any node creates meanwhile is none of these
    reaped = await driver.reap(await sandboxes.live(db), found)
    if reaped:
        log.warning("reaped sandboxes without a session: %s", ", ".join(reaped))
    return reaped


async def _collect_pages(db: Database, engine: EngineLink) -> None:
    """What a crash left in the tiers: no reason not to start."""
    try:
        deleted = await kv_audit.collect(db, await engine.client())
    except EngineError as error:
        log.warning("the tiers could not be looked through: %s", error)
        return
    if deleted:
        log.warning("deleted %d pages that no session names", deleted)


async def _sandboxes(s: Services) -> dict[str, Any]:
    """The driver as it describes itself now, and what the pool has."""
    described = await s.driver.describe()
    return {
        "backend": described.backend,
        "isolation": described.isolation,
        "limits": dict(described.limits_enforced),
        "notes": list(described.notes),
        "pool": s.pool.figures().as_json(),
    }


async def _rest_forever(s: Services, idle_s: float) -> None:
    """Give up sandboxes that nobody uses, and say what the pool has."""
    while True:
        await asyncio.sleep(min(REST_EVERY_S, idle_s / 2))
        try:
            await release_idle(s, idle_s)
            await fleet.note_sandboxes(s.db, s.node_id, s.boot, await _sandboxes(s))
        except Exception:
            log.exception("idle sandboxes could not be looked through; trying again")


async def _sweep_forever(db: Database, keep_days: float) -> None:
    while True:
        try:
            if swept := await retention.sweep(db, keep_days):
                log.info("removed the record of %d sessions that ended over %g days ago", swept, keep_days)
            await errands.sweep(db)
        except Exception:
            log.exception("the record could not be swept; trying again")
        await asyncio.sleep(SWEEP_EVERY_S)


async def _reap_forever(s: Services) -> None:
    """Now and then; pages where the engine was restarted: what its predecessor wrote of a think that it did not end
    has no name, and would stay when its session ends."""
    looked_through = s.engine.connections
    while True:
        await asyncio.sleep(REAP_EVERY_S)
        try:
            await sandboxes.forget_spares(s.db, s.node_id, s.boot)
            await reap(s.db, s.driver)
            await _forget_ended(s)
            if s.engine.connections != looked_through:
                looked_through = s.engine.connections
                await _collect_pages(s.db, s.engine)
        except Exception:
            log.exception("reaping failed; trying again")


async def _forget_ended(s: Services) -> None:
    """Pages of sessions that another node ended while this one, or its engine, could not be reached."""
    for row in await fleet.ended_elsewhere(s.db, s.node_id, 4 * REAP_EVERY_S):
        keys = await fleet.private_pages(s.db, row["session_id"])
        await free_pages(await s.engine.client(), row["session_id"], row["epoch"], row["salt"], keys)


async def _beat(s: Services, drain: Drain) -> None:
    """Renew the lease, ask the engine whether it is there, and drain where that was asked for."""
    asking: asyncio.Task[bool] | None = None
    while True:
        if asking is None:
            asking = asyncio.create_task(s.engine.answers(ENGINE_SILENT_S))
            await asyncio.wait([asking], timeout=BEAT_EVERY_S / 2)
        answers = asking.done() and asking.result()
        if asking.done():
            asking = None
        try:
            if await fleet.heartbeat(s.db, s.node_id, s.boot, engine_answers=answers):
                drain.begin()
            if drain.began and await fleet.wanted_back(s.db, s.node_id, s.boot):
                log.warning("node %s is wanted back; it ends, and takes sessions in its next life", s.node_id)
                os.kill(os.getpid(), signal.SIGTERM)
                return
        except Exception:
            log.exception("no heartbeat; trying again")
        await asyncio.sleep(BEAT_EVERY_S)


@contextlib.asynccontextmanager
async def serving(client: Client, services: Services) -> AsyncIterator[None]:
    """One worker for steps that belong here, one for what any node may take."""

    async def completed(kind: str, what: Any) -> None:
        if kind == THINK:
            await share_at_rest(services, what.session_id, what.epoch)

    steps = Steps(services)
    watched = Watched(services.leaving, completed)
    home = _worker(client, node_queue(services.node_id, services.boot), steps.at_home(), watched)
    anywhere = _worker(client, NODES_QUEUE, steps.anywhere())
    async with home, anywhere:
        yield


def _worker(client: Client, queue: str, activities: list[Callable[..., Any]], *interceptors: Interceptor) -> Worker:
    return Worker(
        client,
        task_queue=queue,
        activities=activities,
        interceptors=interceptors,
        # Without this, heartbeats are throttled to 0.8 of their timeout and a cancel arrives seconds late.
        max_heartbeat_throttle_interval=timedelta(milliseconds=300),
        graceful_shutdown_timeout=timedelta(seconds=2),
        max_concurrent_activities=200,
    )


@contextlib.asynccontextmanager
async def _background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(w) for w in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    run(serve(Settings.load()))
