"""KV intents of the runtime: pin, offload, prefetch, release, drop. Idempotent, fenced by epoch, answered by a receipt.

offload(host)  copies to host in the background; device copies stay, clean, until someone needs their place, or
               go at once with `evict`
offload(nvme)  durable on NVMe; host and device copies of pages that only this session holds are freed
offload(shared) a copy for other machines; the nearer ones stay
prefetch       back to the device
pin, release   keep on the device; stop keeping
drop           the session's pages are gone from every tier; pages that another session holds stay
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.core import EngineCore
from engine.errors import RequestError
from engine.facts import PAGE_SIZE
from engine.kvcall import KvCall
from engine.reports import Reply
from engine.restore import Search, Tail, chain, leading
from engine.sessions import SessionKv
from engine.store import salt_id
from engine.transfers import Waiter
from kvtier import Receipt, Tier, TierStack


class Intents:
    """Runs on the compute thread, between steps; slow parts go through the store's lanes."""

    def __init__(self, core: EngineCore, nvme_after_s: float) -> None:
        self._core = core
        self._store = core.store
        self._nvme_after_s = nvme_after_s
        core.timers.append(self._demote_idle)

    def handle(self, call: KvCall, reply: Reply) -> None:
        """Do it and answer once. Raises RequestError (stale_epoch, bad_request)."""
        call = replace(call, token_ids=call.token_ids[: self._core.limits.context])  # no page lies beyond
        sessions = self._store.sessions
        if sessions.fence(call.session, call.epoch):
            self._core.cancel_session(call.session)
        started_s = time.monotonic()

        def answer(status: str, pages: int = 0, size: int = 0, detail: str = "") -> None:
            ms = round(1e3 * (time.monotonic() - started_s), 3)
            reply({"status": status, "pages": pages, "bytes": size, "ms": ms, "detail": detail})

        if call.intent == "drop":
            self._drop(call, answer)
            return
        record = self._record(call)
        if record is None:
            answer("missing", detail="the engine knows no pages of this session; send its token_ids")
        elif call.intent == "pin":
            self._pin(record, answer)
        elif call.intent == "release":
            record.pinned = False
            held = self._store.unpin(record)
            answer("accepted", held, detail="" if held else "nothing was pinned")
        elif call.intent == "prefetch":
            self._prefetch(record, call, answer)
        else:
            self._offload(record, call, answer)

    # -- intents --------------------------------------------------------------------------------------------------

    def _pin(self, record: SessionKv, answer: Callable[..., None]) -> None:
        room = len(record.pinned_blocks) + self._core.scheduler.spare_pages
        held = self._store.pin(record, room)
        short = len(record.keys) - held
        size = held * self._store.page_bytes
        if short:
            answer("clipped" if held else "missing", held, size, f"{short} pages are not on the device or have no room")
        else:
            answer("accepted", held, size)

    def _offload(self, record: SessionKv, call: KvCall, answer: Callable[..., None]) -> None:
        store = self._store
        if store.stack is None or store.copies is None:
            answer("rejected", detail="this engine has no tiers below the device")
            return
        stack, copies = store.stack, store.copies
        keys, total = list(record.keys), len(record.keys)
        if not keys:
            answer("missing", detail="the session has no pages")
            return
        if call.tier is Tier.NVME:
            record.pinned = False
            store.unpin(record)
        respond = _once(answer)

        def looked(places: list[Tier | None] | None) -> None:
            here = places or [None] * total
            for key, place in zip(keys, here, strict=True):
                store.pool.mark(key, clean=place is not None)  # what a tier has lost is dirty again
            below = sum(place is not None for place in here)
            queued = copies.add(
                keys,
                call.tier,
                epoch=call.epoch,
                salt_id=record.salt_id,
                session=record.name,
                then=lambda stored, size: copied(stored, size, below),
            )
            if not call.wait and (queued or call.tier is not Tier.HOST):
                respond("deferred", queued, queued * store.page_bytes, f"{below} pages were below already")

        def copied(stored: int, size: int, below: int) -> None:
            record.nvme_due_s = time.monotonic() + self._nvme_after_s
            if call.tier is Tier.HOST:
                if call.evict and stored + below >= total:
                    self._free_device(record, keys)
                self._answer_copied(respond, stored + below, total, size)
            elif call.tier is Tier.SHARED:
                store.lanes.write(
                    lambda: stack.copy(keys, Tier.SHARED, epoch=call.epoch, salt_id=record.salt_id),
                    lambda receipt: self._shared(receipt, size, respond),
                )
            else:
                store.lanes.write(
                    lambda: stack.move_to_nvme(keys, epoch=call.epoch, salt_id=record.salt_id),
                    lambda receipt: self._moved(record, keys, receipt, size, respond),
                )

        store.lanes.write(lambda: stack.lookup(keys), looked)

    def _answer_copied(self, respond: Callable[..., None], present: int, total: int, size: int) -> None:
        short = total - present
        if short <= 0:
            respond("accepted", total, size)
        elif present:
            respond(
                "clipped", present, size, f"{short} pages are neither on the device nor below, or have no room there"
            )
        else:
            respond("missing", detail="none of the session's pages could be found or kept")

    def _shared(self, receipt: Receipt | None, size: int, respond: Callable[..., None]) -> None:
        if receipt is None:
            respond("rejected", detail="the shared store could not be written; the pages stay where they are")
        else:
            respond(receipt.status, receipt.pages, receipt.bytes + size, receipt.detail)

    def _moved(
        self, record: SessionKv, keys: list[bytes], receipt: Receipt | None, size: int, respond: Callable[..., None]
    ) -> None:
        """Durable now: free the device copies of private pages that nobody uses."""
        record.nvme_due_s = None
        if receipt is None:
            respond("rejected", detail="NVMe could not be written; the pages stay where they are")
            return
        if receipt.status == "accepted":
            self._free_device(record, keys)
        respond(receipt.status, receipt.pages, receipt.bytes + size, receipt.detail)

    def _free_device(self, record: SessionKv, keys: list[bytes]) -> None:
        """Forget the device copies of pages that lie below, are this session's alone, and that nobody uses."""
        store = self._store
        for key in keys:
            block = store.pool.find(key)
            if block is not None and store.pool.refs(block) == 0 and store.sessions.is_private(record, key):
                store.forget(key)

    def _prefetch(self, record: SessionKv, call: KvCall, answer: Callable[..., None]) -> None:
        store = self._store
        record.nvme_due_s = None
        wanted = [key for key in record.keys if store.pool.find(key) is None]
        tiers = store.transfers
        if not wanted or tiers is None:
            here = len(record.keys) - len(wanted)
            answer(
                "accepted" if not wanted else "missing",
                here,
                detail="" if not wanted else "there are no tiers to fetch from",
            )
            return
        respond = _once(answer)

        def landed(waiter: Waiter) -> None:
            if waiter.waiting:
                return
            if store.sessions.get(record.name) is not record:
                respond("missing", detail="the session was dropped meanwhile")
                return
            short = sum(store.pool.find(key) is None for key in record.keys)
            if record.pinned:
                store.pin(record, len(record.pinned_blocks) + self._core.scheduler.spare_pages)
            here, size = len(record.keys) - short, len(waiter.tiers) * store.page_bytes
            if short:
                respond(
                    "clipped" if here else "missing",
                    here,
                    size,
                    f"{short} pages are in no tier or have no room on the device",
                )
            else:
                respond("accepted", here, size)

        waiter = Waiter(landed)
        near = leading(wanted, tiers.lookup(wanted))[: self._core.scheduler.spare_pages]
        tiers.begin([store.page_of(record, key) for key in near], waiter)
        if not waiter.waiting:
            landed(waiter)
        elif not call.wait:
            respond("deferred", len(wanted), len(wanted) * store.page_bytes)

    def _drop(self, call: KvCall, answer: Callable[..., None]) -> None:
        store = self._store
        self._core.cancel_session(call.session)
        if store.copies is not None:
            store.copies.cancel(call.session)
        record = store.sessions.get(call.session)
        if record is not None:
            store.unpin(record)
        keys = store.sessions.drop(call.session)
        if call.token_ids:
            found = chain(store.root(call.salt), call.token_ids)
            known = set(keys)
            keys += [
                key
                for key in (*found.keys, *(tail.key for tail in found.tails(len(found.keys))))
                if key not in known and not store.sessions.held(key)
            ]
        stack = store.stack
        if not keys:
            answer("missing", detail="the engine knows no pages of this session")
            return
        here = sum(store.forget(key) for key in keys)
        if stack is None:
            answer("accepted", here, here * store.page_bytes)
            return

        def deleted(receipt: Receipt | None) -> None:
            below = receipt.pages if receipt else 0
            detail = "" if receipt else "a tier could not be written; its pages will be found by the next drop"
            answer("accepted" if receipt else "deferred", max(here, below), (receipt.bytes if receipt else 0), detail)

        store.lanes.write(lambda: stack.delete(keys), deleted)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _record(self, call: KvCall) -> SessionKv | None:
        """The session's record; after a restart it is made again from the tokens."""
        store = self._store
        record = store.sessions.get(call.session)
        root = store.root(call.salt)
        if record is not None and record.keys:
            if call.token_ids and record.root != root:
                raise RequestError("bad_request", f"session {call.session!r} was used with another salt; drop it first")
            return record
        if not call.token_ids:
            return None
        found = chain(root, call.token_ids)
        tail = self._known_tail(found)
        keys = found.keys + ([tail.key] if tail else [])
        if not keys:
            return None
        tokens = call.token_ids[: len(found.keys) * PAGE_SIZE + (tail.rows if tail else 0)]
        record = store.sessions.open(call.session, salt_id(call.salt), root)
        store.sessions.update(record, tokens, keys)
        return record

    def _known_tail(self, found: Search) -> Tail | None:
        """The longest partial last page that is on the device or in a tier."""
        stack, tails = self._store.stack, found.tails(len(found.keys))
        places = stack.lookup([tail.key for tail in tails]) if stack is not None else [None] * len(tails)
        for tail, place in zip(tails, places, strict=True):
            if place is not None or self._store.pool.find(tail.key) is not None:
                return tail
        return None

    def _demote_idle(self, now: float) -> float | None:
        """Sessions that were offloaded and stayed idle: their host pages go on to NVMe.

        Seconds until the next is due.
        """
        store = self._store
        stack = store.stack
        next_s: float | None = None
        if stack is None or self._nvme_after_s < 0:
            return None
        for record in store.sessions.all():
            due = record.nvme_due_s
            if due is None:
                continue
            if due <= now:
                self._demote(record, stack)
            else:
                next_s = due - now if next_s is None else min(next_s, due - now)
        return next_s

    def _demote(self, record: SessionKv, stack: TierStack) -> None:
        record.nvme_due_s = None
        keys, salt = list(record.keys), record.salt_id
        self._store.lanes.write(lambda: stack.move_to_nvme(keys, epoch=0, salt_id=salt), lambda _: None)


def _once(answer: Callable[..., None]) -> Callable[..., None]:
    """The first answer counts; later ones, of work that went on in the background, are dropped."""
    answered = False

    def respond(*args: Any, **kwargs: Any) -> None:
        nonlocal answered
        if not answered:
            answered = True
            answer(*args, **kwargs)

    return respond
