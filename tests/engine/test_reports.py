"""What the engine says of its pages while everything goes on."""

from __future__ import annotations

from typing import Any

import pytest

from engine.reports import AuditAsk, Reports
from engine.scheduler import Budget
from kvtier import Tier, TierStack
from tests.engine.fakes import PAGE_BYTES, VOCAB, FakeBackend
from tests.engine.stepped import Stepped
from tests.engine.test_pages_in_flight import BLOCKS, PROMPT, offloaded, stack

__all__ = ["stack"]


@pytest.fixture
def engine(stack: TierStack) -> Stepped:
    return Stepped(FakeBackend(BLOCKS), BLOCKS, stack, page_bytes=PAGE_BYTES, vocab=VOCAB, context=512, budget=Budget())


def unclaimed(report: dict[str, Any]) -> set[str]:
    return {key for keys in report["tiers"].values() for key in keys} - set(report["held"])


def test_what_a_think_stores_while_the_tiers_are_read_is_no_orphan(engine: Stepped, stack: TierStack) -> None:
    told: list[dict[str, Any]] = []
    engine.submit("s", PROMPT, 20, 1)
    engine.turn()
    Reports(engine.core).audit(AuditAsk(), told.append)
    while engine.core.scheduler.requests():
        engine.turn()
    receipts = engine.kv("offload", "s", tier="host")
    while not receipts:
        engine.turn()
        if engine.lanes.writes:
            engine.lanes.land_write()
    assert stack.keys(Tier.HOST)
    engine.settle()
    assert told[0]["tiers"]["host"]
    assert not unclaimed(told[0])


def test_what_is_dropped_while_the_tiers_are_read_is_no_orphan(engine: Stepped) -> None:
    told: list[dict[str, Any]] = []
    offloaded(engine, "host")
    engine.kv("drop", "s")
    Reports(engine.core).audit(AuditAsk(verify=False), told.append)
    engine.settle()
    assert not unclaimed(told[0])


def test_parts_together_are_the_whole(engine: Stepped, stack: TierStack) -> None:
    told: list[dict[str, Any]] = []
    offloaded(engine, "host")
    for part in range(3):
        Reports(engine.core).audit(AuditAsk(part=part, parts=3), told.append)
        engine.settle()
    keys = [key for report in told for key in report["tiers"]["host"]]
    assert sorted(keys) == sorted(key.hex() for key in stack.keys(Tier.HOST))
    assert len({tuple(report["tiers"]["host"]) for report in told}) > 1


def test_pages_that_a_think_under_way_looks_for_are_spared(engine: Stepped, stack: TierStack) -> None:
    """Its session is new to the engine, and no checkpoint names them yet."""
    transcript = offloaded(engine, "host")
    (record,) = engine.store.sessions.all()
    keys = list(record.keys)
    engine.store.sessions.drop("s")  # as after a restart: nobody here knows whose they are
    back = engine.submit("s", [*transcript, 5], 2, 3, known=len(transcript))
    receipts: list[dict[str, Any]] = []
    Reports(engine.core).delete_keys(keys[:3], receipts.append, unheld=True)
    engine.settle()
    assert (back.reason, receipts[0]["status"]) == ("length", "missing")
    assert set(keys[:3]) <= stack.keys(Tier.HOST)
    Reports(engine.core).delete_keys(keys[:3], receipts.append)
    engine.settle()
    assert not set(keys[:3]) & stack.keys(Tier.HOST)
