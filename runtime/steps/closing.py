"""End a session: its processes are dead, its pages free, and then the row says so."""

from __future__ import annotations

import asyncio
import logging

from engine import EngineClient, EngineError
from runtime.errors import NotFound, StaleEpoch
from runtime.steps.boxes import release_box
from runtime.steps.children import end_children
from runtime.steps.collecting import collect_session
from runtime.steps.services import Services
from runtime.store import fleet, placement, sessions
from runtime.store.values import Session
from workflows.contract import FinishIn

log = logging.getLogger(__name__)

_OTHERS_PATIENCE_S = 5.0


async def finish(s: Services, what: FinishIn) -> None:
    if await sessions.has_ended(s.db, what.session_id):
        return
    try:
        # Raising the epoch first makes every other writer of this session stop.
        epoch = await placement.take(s.db, what.session_id, s.node_id, s.boot)
    except NotFound:
        return
    session = await sessions.get(s.db, what.session_id)
    if session.epoch != epoch:
        raise StaleEpoch(f"session {what.session_id} is being ended by another node")
    children = await end_children(s, what.session_id, session.tenant_id)
    had_sandbox = await release_box(s, what.session_id)
    keys = await fleet.private_pages(s.db, what.session_id)
    pages = await free_pages(await s.engine.client(), session.session_id, epoch, session.salt, keys)
    for address in await fleet.other_engines(s.db, what.session_id, s.node_id):
        pages += await _free_elsewhere(address, session, epoch, keys)
    blobs = await collect_session(s, what.session_id)
    await fleet.note_residency(s.db, what.session_id, session.tenant_id, "none", {})
    freed = {"pages": pages, "sandboxes": int(had_sandbox), "blobs": blobs, "children": children}
    await sessions.finish(s.db, what.session_id, what.how, freed)


async def free_pages(client: EngineClient, session_id: str, epoch: int, salt: bytes, keys: list[str]) -> int:
    """What one engine has of a session that ends; `keys`: pages that only its record names."""
    dropped = await client.kv("drop", session=session_id, epoch=epoch, salt=salt, wait=True)
    # The record does not know yet what a first think of another session shares with this one; the engine does.
    deleted = await client.delete_keys(keys, unheld=True)
    return dropped.pages + deleted.pages


async def _free_elsewhere(address: str, session: Session, epoch: int, keys: list[str]) -> int:
    """An engine that had the session before. One that cannot be reached from here is its own node's to tidy up."""
    try:
        async with asyncio.timeout(_OTHERS_PATIENCE_S):
            async with await EngineClient.connect(address, timeout_s=2.0) as client:
                return await free_pages(client, session.session_id, epoch, session.salt, keys)
    except (EngineError, TimeoutError) as error:
        log.info("%s still has pages of %s: %s", address, session.session_id, error)
        return 0
