"""Where the session's KV waits while its tool runs: copied eagerly, freed lazily, back at the pause's end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator

from engine import EngineGone
from runtime.errors import StaleEpoch
from runtime.steps.services import Services
from runtime.store import events, fleet
from runtime.store.values import Attempt, Event, Owner

_EVENT = {"pin": "kv.pinned", "offload": "kv.offloaded", "prefetch": "kv.prefetched", "drop": "kv.released"}


@contextlib.asynccontextmanager
async def kv_pause(s: Services, owner: Owner, attempt: Attempt, policy: str) -> AsyncIterator[None]:
    """Hold the session's pages by `policy` (auto, pin, host, nvme, drop) for the duration of the block."""
    moving = asyncio.create_task(_move_out(s, owner, attempt, policy))
    try:
        yield
    finally:
        moving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await moving
    if policy == "pin":
        await _intend(s, owner, attempt, "release", None)
    elif policy != "drop":
        await _intend(s, owner, attempt, "prefetch", None)


async def _move_out(s: Services, owner: Owner, attempt: Attempt, policy: str) -> None:
    if policy == "pin":
        await _intend(s, owner, attempt, "pin", None)
    elif policy == "drop":
        await _intend(s, owner, attempt, "drop", None)
    elif policy == "host":
        await _intend(s, owner, attempt, "offload", "host", evict=True)
    elif policy == "nvme":
        await _intend(s, owner, attempt, "offload", "nvme", evict=True)
    else:
        # Copied at once, so that the pages are clean and can be freed whenever someone needs them; a tool that
        # runs on is waited for on NVMe.
        began = time.monotonic()
        await _intend(s, owner, attempt, "offload", "host")
        await asyncio.sleep(max(0.0, s.nvme_after_s - (time.monotonic() - began)))
        await _intend(s, owner, attempt, "offload", "nvme", evict=True)


async def _intend(
    s: Services,
    owner: Owner,
    attempt: Attempt,
    intent: str,
    tier: str | None,
    *,
    evict: bool = False,
) -> None:
    """One intent to the engine, its receipt in the log. An engine that is gone is the next think's concern."""
    try:
        client = await s.engine.client()
        receipt = dataclasses.asdict(
            await client.kv(
                intent,
                session=owner.session_id,
                epoch=owner.epoch,
                salt=attempt.session.salt,
                tier=tier,
                wait=True,
                evict=evict,
            )
        )
    except EngineGone:
        return
    if intent not in _EVENT or receipt["status"] == "missing":
        return
    data = {"tier": tier, **receipt} if tier else receipt
    with contextlib.suppress(StaleEpoch):  # a newer owner tells its own story
        await events.write(
            s.db, owner.session_id, [Event(_EVENT[intent], data)], epoch=owner.epoch, step_no=attempt.step_no
        )
    if receipt["status"] in ("accepted", "clipped") and intent != "prefetch":
        where = "none" if intent == "drop" else tier or "device"
        await fleet.note_residency(s.db, owner.session_id, attempt.session.tenant_id, where, receipt)
