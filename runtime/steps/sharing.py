"""A copy of a session's pages where other nodes find it: whoever takes the session over need not compute them."""

from __future__ import annotations

import logging

from engine import EngineError, KvReceipt
from runtime.errors import NotFound
from runtime.steps.services import Services
from runtime.store import sessions, standing

log = logging.getLogger(__name__)


async def share_at_rest(s: Services, session_id: str, epoch: int) -> None:
    """After a think that no tool follows; where one does, the pause of its tool shares once the pages have moved."""
    if not s.shares:
        return
    progress = await s.db.run(lambda connection: standing.progress(connection, session_id))
    if progress.kind == "think" and progress.outcome != "tools":
        await share(s, session_id, epoch)


async def share(s: Services, session_id: str, epoch: int | None = None) -> KvReceipt | None:
    """Copy to the shared store what is not there yet; the nearer copies stay. None where that cannot be, since it is a
    convenience: what is missing is computed. `epoch`: only while the session is held at it."""
    if not s.shares:
        return None
    try:
        session = await sessions.get(s.db, session_id)
        if epoch is not None and session.epoch != epoch:
            return None
        client = await s.engine.client()
        return await client.kv(
            "offload", session=session_id, epoch=session.epoch, salt=session.salt, tier="shared", wait=True
        )
    except (EngineError, NotFound) as error:
        log.info("the pages of %s are not shared: %s", session_id, error)
        return None
