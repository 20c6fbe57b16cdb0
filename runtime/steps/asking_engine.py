"""Errands about KV: intents from outside, what an engine says of itself, and whether its tiers add up."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine import KvReceipt, RequestError
from runtime import kv_audit
from runtime.errors import InvalidRequest, Unavailable
from runtime.steps.services import Services
from runtime.store import events, fleet, sandboxes, sessions, steps
from runtime.store.errands import Errand
from runtime.store.values import Event, Session
from runtime.workspaces import Answer
from workflows.states import TERMINAL

_EVENT = {"pin": "kv.pinned", "offload": "kv.offloaded", "prefetch": "kv.prefetched", "release": "kv.released"}
_NO_PAGES = KvReceipt("missing", 0, 0, 0.0, "the session has no pages: nothing of it has been computed yet")
_ENDED = KvReceipt("missing", 0, 0, 0.0, "the session has ended, and its pages went with it")


async def intend(s: Services, errand: Errand) -> Answer:
    """One intent, at the epoch that the session has now; its receipt. A session without pages is `missing`."""
    assert errand.session_id is not None
    session = await sessions.get(s.db, errand.session_id)
    token_ids = await steps.transcript(s.db, session.session_id, 2**31 - 1)
    if session.state in TERMINAL:
        receipt = _ENDED
    elif not token_ids:
        receipt = _NO_PAGES
    else:
        receipt = await _asked(s, session, token_ids, errand.request)
        await _tell(s, session, errand.request["intent"], receipt)
    return {**dataclasses.asdict(receipt), "epoch": session.epoch}, None


async def _asked(s: Services, session: Session, token_ids: list[int], asked: Any) -> KvReceipt:
    client = await s.engine.client()
    try:
        return await client.kv(
            asked["intent"],
            session=session.session_id,
            epoch=session.epoch,
            salt=session.salt,
            token_ids=token_ids,
            tier=asked["tier"],
            ttl_s=asked["ttl_s"],
            wait=asked["wait"],
            source="api",
        )
    except RequestError as error:
        if error.code == "stale_epoch":
            raise Unavailable("the session has just moved to another node") from error
        raise InvalidRequest(str(error)) from error


async def _tell(s: Services, session: Session, intent: str, receipt: KvReceipt) -> None:
    """In the session's log, as of the intents of its steps; and where its pages are now, as far as is known."""
    if receipt.status in ("missing", "rejected", "external"):
        return
    told = {name: value for name, value in dataclasses.asdict(receipt).items() if value is not None}
    event = Event(_EVENT[intent], {**told, "source": "api"})
    await s.db.run(lambda connection: events.append(connection, session.session_id, [event]))
    if intent == "offload" and receipt.status == "accepted" and receipt.tier is not None:
        await fleet.note_residency(s.db, session.session_id, session.tenant_id, receipt.tier, told)


async def describe(s: Services, errand: Errand) -> Answer:
    """The engine's card and its figures."""
    client = await s.engine.client()
    return {"node": s.node_id, "card": client.card.as_message(), "stats": await client.stats()}, None


async def examine(s: Services, errand: Errand) -> Answer:
    """What a doctor wants to know of the engine: card, figures, what its time went into; and what workspaces may take
    of this machine's memory."""
    client = await s.engine.client()
    stats, engine = await client.stats(), await client.spans()
    workspaces = await sandboxes.workspaces(s.db, s.node_id)
    card = client.card.as_message()
    return {"node": s.node_id, "card": card, "stats": stats, "engine": engine, "workspaces": workspaces}, None


async def audit(s: Services, errand: Errand) -> Answer:
    """Every page of every tier of this node, read and compared with the record."""
    asked = errand.request
    found = await kv_audit.audit(s.db, await s.engine.client(), repair=asked["repair"], shared=asked["shared"])
    return {"node": s.node_id, **dataclasses.asdict(found), "clean": found.clean}, None
