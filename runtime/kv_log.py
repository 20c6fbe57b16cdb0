"""Brings the engine's decision log into the record, so that it outlives the engine."""

from __future__ import annotations

import asyncio
import logging

from engine import EngineGone
from runtime import kv_audit
from runtime.engines import EngineLink
from runtime.store import Database, decisions

log = logging.getLogger(__name__)

EVERY_S = 1.0
BATCH = 500


async def drain(engine: EngineLink, db: Database, seen: tuple[str, int]) -> tuple[str, int]:
    """Take over what came or changed since `seen` (the engine's boot and a version); returns how far it came."""
    client = await engine.client()
    boot = client.card.boot_id
    after = seen[1] if seen[0] == boot else 0
    if seen[0] != boot:
        await kv_audit.teach(db, client)  # it was restarted
    while True:
        version, entries = await client.decisions(after, BATCH)
        await decisions.write(db, boot, entries)
        after = version
        if len(entries) < BATCH:
            return boot, after


async def drain_forever(engine: EngineLink, db: Database) -> None:
    seen = ("", 0)
    while True:
        try:
            seen = await drain(engine, db, seen)
        except EngineGone:
            pass  # it is being restarted; it will tell again what it remembers
        except Exception:
            log.exception("the decision log could not be taken over; trying again")
        await asyncio.sleep(EVERY_S)
