"""KV intents of the runtime: pin, offload, prefetch, release, drop. Idempotent, fenced by epoch, answered by a receipt.

offload(host)  copies to host in the background; device copies stay, clean, until someone needs their place, or
               go at once with `evict`
offload(nvme)  durable on NVMe; host and device copies of pages that only this session holds are freed
offload(shared) a copy for other machines; the nearer ones stay
offload(auto)  where the policy says, by what is told of the pause
prefetch       back to the device: the pause is over
pin, release   keep on the device, for ttl_s if given; stop keeping
drop           the session's pages are gone from every tier; pages that another session holds stay
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.core import EngineCore
from engine.decisions import DecisionLog
from engine.errors import RequestError
from engine.facts import PAGE_SIZE
from engine.keeper import Keeper
from engine.kvcall import KvCall
from engine.moves import Moved, Moves
from engine.pins import Pins
from engine.reports import Reply
from engine.restore import Search, Tail, chain, leading
from engine.sessions import SessionKv
from engine.speeds import Speeds
from engine.store import salt_id
from engine.transfers import Waiter
from kvtier import Receipt, Tier


class Intents:
    """Runs on the compute thread, between steps; slow parts go through the store's lanes."""

    def __init__(self, core: EngineCore, keeper: Keeper | None = None) -> None:
        self._core = core
        self._store = core.store
        self._moves = Moves(core)
        self.keeper = keeper or Keeper(core, self._moves, DecisionLog(), Speeds())
        self._pins = Pins(core, self.keeper)

    def handle(self, call: KvCall, reply: Reply) -> None:
        """Do it and answer once. Raises RequestError (stale_epoch, bad_request)."""
        call = replace(call, token_ids=call.token_ids[: self._core.limits.context])  # no page lies beyond
        sessions = self._store.sessions
        if sessions.fence(call.session, call.epoch):
            self._core.cancel_session(call.session)
            self._store.unpin_of(call.session)  # a lease ends with its epoch
        started_s = time.monotonic()

        def answer(status: str, pages: int = 0, size: int = 0, detail: str = "", tier: str | None = None) -> None:
            ms = round(1e3 * (time.monotonic() - started_s), 3)
            reply({"status": status, "pages": pages, "bytes": size, "ms": ms, "detail": detail, "tier": tier})

        if call.intent == "drop":
            self._drop(call, answer)
            return
        record = self._record(call)
        if record is None:
            answer("missing", detail="the engine knows no pages of this session; send its token_ids")
        elif call.intent == "pin":
            self._pins.pin(record, call, answer)
        elif call.intent == "release":
            self.keeper.ended(record, call)
            held = self._pins.unpin(record) if call.tokens is None else self._pins.unpin_range(record, call)
            answer("accepted", held, detail="" if held else "nothing was pinned")
        elif call.intent == "prefetch":
            self._come_back(record, call, answer)
        elif call.tier is None:
            self._by_policy(record, call, answer)
        else:
            self._offload(record, call, call.tier, answer)

    def epoch(self, session: str) -> int:
        """Of its present owner, as far as is known."""
        return self._store.sessions.epoch(session)

    # -- intents --------------------------------------------------------------------------------------------------

    def _by_policy(self, record: SessionKv, call: KvCall, answer: Callable[..., None]) -> None:
        respond = _once(answer)
        self.keeper.paused(
            record,
            call,
            lambda moved, tier: respond(moved.status, moved.pages, moved.bytes, moved.detail, tier),
        )
        if not call.wait:
            respond("deferred", len(record.keys), detail="the policy decides where they go")

    def _offload(self, record: SessionKv, call: KvCall, tier: Tier, answer: Callable[..., None]) -> None:
        store = self._store
        if call.pause is not None:
            self.keeper.waits(record, call)
        if tier is Tier.NVME:
            self._pins.unpin(record)
        respond = _once(answer)
        keys = call.keys_of(record.keys)
        entry = self.keeper.journal.asked(record, call, tier.value)

        def queued(count: int, below: int) -> None:
            if not call.wait and (count or tier is not Tier.HOST):
                respond("deferred", count, count * store.page_bytes, f"{below} pages were below already", tier)

        def stored(moved: Moved) -> None:
            if moved.whole and (tier is Tier.NVME or call.evict):
                self._moves.free_device(record, keys)
            if call.tokens is None:
                self.keeper.stored(record, tier, moved)
            link = self.keeper.speeds.links[tier]
            self.keeper.journal.stored(entry, link, moved.bytes, moved.seconds, moved.whole, moved.detail)
            respond(moved.status, moved.pages, moved.bytes, moved.detail, tier)

        self._moves.store(record, tier, call.epoch, stored, queued, None if call.tokens is None else keys)

    def _come_back(self, record: SessionKv, call: KvCall, answer: Callable[..., None]) -> None:
        """The wait is over. What is quicker computed again stays where it is."""
        if not self.keeper.ended(record, call):
            answer("rejected", detail="computing them again is quicker than reading them back")
            return
        self._prefetch(record, call, answer)

    def _prefetch(self, record: SessionKv, call: KvCall, answer: Callable[..., None]) -> None:
        store = self._store
        asked, begun_s = call.keys_of(record.keys), time.monotonic()
        wanted = [key for key in asked if store.pool.find(key) is None]
        tiers = store.transfers
        if not wanted or tiers is None:
            here = len(asked) - len(wanted)
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
            store.prefetched(key for key in waiter.tiers if store.pool.find(key) is not None)
            counts = Counter(waiter.tiers.values())
            tokens = {tier: count * PAGE_SIZE for tier, count in counts.items()}
            self.keeper.brought(record, call, tokens, time.monotonic() - begun_s)
            short = sum(store.pool.find(key) is None for key in asked)
            if record.pinned:
                store.pin(record, len(record.pinned_blocks) + self._core.scheduler.spare_pages)
            here, size = len(asked) - short, len(waiter.tiers) * store.page_bytes
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
            self._pins.unpin(record)
        if record is not None and record.keys:
            dropped = self.keeper.journal.asked(record, call, "everywhere")
            self.keeper.decisions.settle(dropped, None)
        self.keeper.journal.dropped(call.session)
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
            for key in keys:  # one that was being read back meanwhile came as a clean copy of what is gone now
                store.pool.mark(key, clean=False)
            below = receipt.pages if receipt else 0
            detail = "" if receipt else "a tier could not be written; its pages will be found by the next drop"
            answer("accepted" if receipt else "deferred", max(here, below), (receipt.bytes if receipt else 0), detail)

        store.delete_below(keys, deleted)

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
        if store.stack is not None:
            first, last = store.stack.lookup([keys[0], keys[-1]])
            if first is not None and last is not None and last is not Tier.SHARED:
                record.copy, record.copy_to = last, len(tokens)
        return record

    def _known_tail(self, found: Search) -> Tail | None:
        """The longest partial last page that is on the device or in a tier."""
        stack, tails = self._store.stack, found.tails(len(found.keys))
        places = stack.lookup([tail.key for tail in tails]) if stack is not None else [None] * len(tails)
        for tail, place in zip(tails, places, strict=True):
            if place is not None or self._store.pool.find(tail.key) is not None:
                return tail
        return None


def _once(answer: Callable[..., None]) -> Callable[..., None]:
    """The first answer counts; later ones, of work that went on in the background, are dropped."""
    answered = False

    def respond(*args: Any, **kwargs: Any) -> None:
        nonlocal answered
        if not answered:
            answered = True
            answer(*args, **kwargs)

    return respond
