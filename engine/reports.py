"""Answers about pages: where a session's are, whether the books add up; and the deletion of pages by key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.core import EngineCore
from engine.fields import Fields
from engine.keeper import Keeper
from engine.memory_use import MemoryUse
from kvtier import Audit, Receipt, Tier, TierStack

Reply = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class AuditAsk:
    """`part` of `parts`: the keys whose first byte, modulo `parts`, it is; a frame has no room for millions."""

    repair: bool = False
    verify: bool = True
    every_key: bool = False
    part: int = 0
    parts: int = 1


def parse_audit(message: Mapping[str, Any]) -> AuditAsk:
    """Raises RequestError (bad_request) that names the field."""
    fields = Fields(message)
    parts = fields.integer("parts", 1, 1, 256)
    part = fields.integer("part", 0, 0, parts - 1)
    flags = (fields.flag("repair", False), fields.flag("verify", True), fields.flag("every_key", False))
    return AuditAsk(*flags, part, parts)


class Reports:
    """Runs on the compute thread, between steps; slow parts go through the store's lanes."""

    def __init__(self, core: EngineCore, keeper: Keeper | None = None, memory: MemoryUse | None = None) -> None:
        self._core = core
        self._memory = memory
        self._store = core.store
        self._keeper = keeper

    def state(self, session: str, reply: Reply) -> None:
        """Where a session's pages are now."""
        store = self._store
        record = store.sessions.get(session)
        keys = list(record.keys) if record else []
        device = sum(store.pool.find(key) is not None for key in keys)
        stack = store.stack
        facts = {
            "session": session,
            "tokens": len(record.tokens) if record else 0,
            "device_pages": device,
            "pinned": bool(record and record.pinned_blocks),
            "keys": [key.hex() for key in keys],
        }

        def looked(places: list[Tier | None] | None) -> None:
            pages = {tier.value: sum(place is tier for place in places or []) for tier in Tier}
            held = {tier: count * store.page_bytes for tier, count in ({"device": device} | pages).items()}
            reply({**facts, **{f"{tier}_pages": count for tier, count in pages.items()}, "bytes": held})

        if stack is None or not keys:
            looked(None)
        else:
            store.lanes.write(lambda: stack.lookup(keys), looked)

    def delete_keys(self, keys: list[bytes], reply: Reply, *, unheld: bool = False) -> None:
        """Delete exactly these pages in every tier, and on the device where nobody runs on them. `unheld`: but for
        those that a session has, or a request runs on or will look for: who asks may not have heard of it yet."""
        store = self._store
        if unheld:
            claimed = self._claimed()
            keys = [key for key in keys if key not in claimed]
        here = sum(store.forget(key) for key in keys)
        stack = store.stack

        def deleted(receipt: Receipt | None) -> None:
            for key in keys:  # one that was being read back meanwhile came as a clean copy of what is gone now
                store.pool.mark(key, clean=False)
            pages = max(here, receipt.pages if receipt else 0)
            status = "accepted" if pages else "missing"
            reply({"status": status, "pages": pages, "bytes": receipt.bytes if receipt else 0, "ms": 0.0, "detail": ""})

        if stack is None:
            deleted(None)
        else:
            store.delete_below(keys, deleted)

    def decisions(self, version: int, limit: int, reply: Reply) -> None:
        """Entries of the decision log that came or changed after `version`."""
        if self._keeper is None:
            reply({"version": 0, "decisions": []})
            return
        newest, entries = self._keeper.decisions.since(version, limit)
        reply({"version": newest, "decisions": entries})

    def audit(self, ask: AuditAsk, reply: Reply) -> None:
        """What lies in every tier and what sessions, requests and the device name; with `verify`, every page is read.

        Reading takes long, and everything goes on meanwhile. So the tiers' keys are listed afterwards, behind all that
        was to be written or deleted by then, and `held` are those that were claimed before it or are after it.
        """
        store, stack, before = self._store, self._store.stack, self._claimed()

        def answer(tiers: dict[str, list[str]] | None, found: dict[str, Any] | None) -> None:
            told = found if found is not None else _NOTHING_READ
            lost = None if tiers is not None and found is not None else "the tiers did not answer"
            reply(
                {
                    **told,
                    "tiers": tiers or {},
                    "sessions": [record.name for record in store.sessions.all()],
                    "held": _hex(before | self._claimed(), ask),
                    "device": _hex(store.pool.indexed(), ask),
                    "integrity": lost or _fault(self._core.check_integrity) or "ok",
                }
            )

        def read(found: dict[str, Any] | None) -> None:
            if stack is None:
                answer({}, found)
            else:
                store.lanes.write(lambda: _keys(stack, ask), lambda tiers: answer(tiers, found))

        if stack is None or not ask.verify:
            read(_NOTHING_READ)
        else:
            store.lanes.read(lambda: _findings(stack.audit(repair=ask.repair, every_key=ask.every_key)), read)

    def _claimed(self) -> set[bytes]:
        """Keys that a session has, or that a request runs on or will look for."""
        claimed = self._store.sessions.keys()
        for request in self._core.scheduler.requests():
            claimed.update(request.keys, request.known_keys())
        return claimed

    def learn(self, salts: Sequence[bytes], reply: Reply) -> None:
        """Salts of those who may have pages here, whose sessions have not come yet: what is encrypted can be read."""
        for salt in salts:
            self._store.root(salt)
        reply({"learned": len(salts)})

    def spans(self, reply: Reply) -> None:
        """What the engine's time went into lately, and its memory; see `engine.spans` and `engine.memory_use`."""
        limits = {"running": self._core.scheduler.most_running, "pool_pages": self._store.pool.total}
        memory = self._memory.as_message() if self._memory is not None else None
        reply({"spans": self._core.told_spans(), "memory": memory, "limits": limits})

    def stats(self, reply: Reply) -> None:
        """Pool, scheduler, counters and tiers, and whether the books add up."""
        store, core = self._store, self._core
        stack = store.stack
        facts: dict[str, Any] = {
            "pool": asdict(store.pool.counts()),
            "pinned_pages": store.pinned_pages,
            "owed_pages": core.scheduler.owed_pages,
            "waste": asdict(store.waste(core.scheduler.requests())),
            "metrics": core.metrics.as_message(),
            "speculation": core.speculator.totals.as_message(),
            "waiting": core.scheduler.waiting,
            "running": core.scheduler.admitted,
            "sessions": len(store.sessions),
            "steps": core.steps,
            "counters": {**asdict(store.counters), "copied_out": store.copies.stored_pages if store.copies else 0},
            "io_failures": store.lanes.failures,
            "overdue_writes": store.lanes.overdue_writes,
        }
        if self._keeper is not None:
            facts |= {"speeds": self._keeper.speeds.as_message(), "break_even": self._keeper.break_even()}
        faults = [_fault(core.check_integrity)]

        def counted(result: tuple[dict[str, Any], str | None] | None) -> None:
            tiers, fault = result or ({}, "the tiers did not answer")
            told = [text for text in (*faults, fault) if text]
            quarantined = sum(counts.get("quarantined", 0) for counts in tiers.values())
            reply({**facts, "tiers": tiers, "quarantined": quarantined, "integrity": "; ".join(told) or "ok"})

        if stack is None:
            counted(({}, None))
        else:
            store.lanes.write(lambda: (asdict(stack.stats()), _fault(stack.check_integrity)), counted)


_NOTHING_READ: dict[str, Any] = {"findings": [], "pages": 0, "bytes": 0}


def _findings(found: Audit) -> dict[str, Any]:
    told = [{**asdict(one), "tier": one.tier.value, "flaw": one.flaw.value} for one in found.findings]
    return {"findings": told, "pages": found.pages, "bytes": found.size_bytes}


def _keys(stack: TierStack, ask: AuditAsk) -> dict[str, list[str]]:
    return {tier.value: _hex(stack.keys(tier), ask) for tier in Tier}


def _hex(keys: Iterable[bytes], ask: AuditAsk) -> list[str]:
    return [key.hex() for key in keys if key[0] % ask.parts == ask.part]


def _fault(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception as error:  # a failed check is an answer, whatever its kind
        return f"{type(error).__name__}: {error}"
    return None
