"""Answers about pages: where a session's are, whether the books add up; and the deletion of pages by key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engine.core import EngineCore
from engine.keeper import Keeper
from kvtier import Audit, Receipt, Tier, TierStack

Reply = Callable[[dict[str, Any]], None]


class Reports:
    """Runs on the compute thread, between steps; slow parts go through the store's lanes."""

    def __init__(self, core: EngineCore, keeper: Keeper | None = None) -> None:
        self._core = core
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

    def delete_keys(self, keys: list[bytes], reply: Reply) -> None:
        """Delete exactly these pages in every tier, and on the device where nobody runs on them."""
        store = self._store
        here = sum(store.forget(key) for key in keys)
        stack = store.stack

        def deleted(receipt: Receipt | None) -> None:
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

    def audit(self, repair: bool, verify: bool, reply: Reply) -> None:
        """What lies in every tier and what the sessions and the device name; with `verify`, every page is read."""
        store = self._store
        facts: dict[str, Any] = {
            "sessions": {record.name: [key.hex() for key in record.every_key] for record in store.sessions.all()},
            "device": [key.hex() for key in store.pool.indexed()],
            "integrity": _fault(self._core.check_integrity) or "ok",
        }
        nothing: dict[str, Any] = {"findings": [], "pages": 0, "bytes": 0, "tiers": {}}
        stack = store.stack

        def audited(result: dict[str, Any] | None) -> None:
            told = result if result is not None else {**nothing, "integrity": "the tiers did not answer"}
            reply({**facts, **told})

        if stack is None:
            audited(nothing)
        else:
            store.lanes.read(lambda: _audit(stack, repair, verify), audited)

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


def _audit(stack: TierStack, repair: bool, verify: bool) -> dict[str, Any]:
    found = stack.audit(repair=repair) if verify else Audit((), 0, 0)
    findings = [{**asdict(one), "tier": one.tier.value, "flaw": one.flaw.value} for one in found.findings]
    tiers = {tier.value: [key.hex() for key in stack.keys(tier)] for tier in Tier}
    return {"findings": findings, "pages": found.pages, "bytes": found.size_bytes, "tiers": tiers}


def _fault(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception as error:  # a failed check is an answer, whatever its kind
        return f"{type(error).__name__}: {error}"
    return None
