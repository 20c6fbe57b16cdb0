"""Pages on their way to a tier and back, while everything else goes on."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.reports import Reports
from engine.scheduler import Budget
from kvtier import TierConfig, TierStack
from kvtier.faults import Fault, FaultyIo
from tests.engine.fakes import PAGE_BYTES, VOCAB, FakeBackend
from tests.engine.stepped import Stepped, Told

PROMPT = [(5 * i + 3) % 50 + 3 for i in range(45)]
BLOCKS = 12


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[TierStack]:
    room = PAGE_BYTES + 4096
    stack = TierStack.open(
        TierConfig(PAGE_BYTES, b"f" * 32, tmp_path / "arena", 64 * room, tmp_path / "nvme", 64 * room)
    )
    yield stack
    stack.close()


@pytest.fixture
def engine(stack: TierStack) -> Stepped:
    return Stepped(FakeBackend(BLOCKS), BLOCKS, stack, page_bytes=PAGE_BYTES, vocab=VOCAB, context=512, budget=Budget())


def alone(told: Told) -> list[int]:
    engine = Stepped(FakeBackend(64), 64, None, page_bytes=PAGE_BYTES, vocab=VOCAB, context=512, budget=Budget())
    again = engine.submit("alone", told.prompt, told.count, told.sampling.seed)
    engine.settle()
    return again.tokens


def offloaded(engine: Stepped, tier: str) -> list[int]:
    """A session whose pages lie in a tier only; returns its transcript."""
    first = engine.submit("s", PROMPT, 20, 1)
    engine.settle()
    engine.kv("offload", "s", tier=tier, evict=True)
    engine.settle()
    return [*first.prompt, *first.tokens]


def test_a_copy_out_is_taken_after_the_step_that_fills_the_page(engine: Stepped, stack: TierStack) -> None:
    """Offloads that come between any two steps of a generation copy rows that are there, never ones that will be."""
    first = engine.submit("s", PROMPT, 3, 1)
    engine.settle()
    told = engine.submit("s", [*PROMPT, *first.tokens, *PROMPT], 40, 2, known=47)
    while told.reason is None:
        engine.kv("offload", "s", tier="host")
        engine.round()
    engine.settle()
    (record,) = engine.store.sessions.all()
    found = 0
    for page, key in enumerate(record.keys):
        (loaded,) = stack.get([key])
        if loaded is not None:
            tokens = record.tokens[page * 16 : (page + 1) * 16]
            rows = [struct.pack("<ii", token, page * 16 + row + 1) for row, token in enumerate(tokens)]
            assert bytes(loaded.payload) == b"".join(rows).ljust(PAGE_BYTES, b"\0")
            found += 1
    assert found >= 2


def test_a_block_that_is_reused_while_its_copy_is_in_flight_leaves_the_copy_as_it_was(
    engine: Stepped, stack: TierStack
) -> None:
    first = engine.submit("s", PROMPT, 20, 1)
    engine.settle()
    keys = engine.store.sessions.all()[0].keys
    pages = {key: engine.store.backend.snapshot(engine.store.pool.find(key) or 0, 16) for key in keys[:-1]}
    engine.kv("offload", "s", tier="host")
    engine.lanes.land_write()  # the look-up: the copies are snapshotted from here on
    engine.turn()
    assert engine.lanes.writes
    for other in range(4):  # others take every block while nothing has landed
        engine.submit(f"o{other}", [other + 20] * 100, 20, other + 10)
    while any(t.reason is None for t in engine.told):
        engine.turn()
        while engine.lanes.reads:
            engine.lanes.land_read(0)
    assert not any(engine.store.pool.find(key) for key in pages)
    engine.settle()
    for key, page in pages.items():
        (loaded,) = stack.get([key])
        assert loaded is not None
        assert bytes(loaded.payload) == page
    again = engine.submit("s", [*first.prompt, *first.tokens, 5], 9, 3, known=64)
    engine.settle()
    assert again.tokens == alone(again)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_transfer_that_failed_is_computed_not_believed(engine: Stepped, tier: str) -> None:
    transcript = offloaded(engine, tier)
    told = engine.submit("s", [*transcript, 5], 9, 3, known=len(transcript) - 1)
    while not engine.lanes.reads:
        engine.turn()
    engine.lanes.land_read(0, lost=True)
    engine.settle()
    assert told.tokens == alone(told)
    counters = engine.store.counters
    assert counters.recomputed_tokens == len(transcript) - 1
    assert counters.restored_host_tokens + counters.restored_nvme_tokens == 0


def test_nothing_is_decoded_while_a_restore_is_under_way(engine: Stepped) -> None:
    transcript = offloaded(engine, "nvme")
    told = engine.submit("s", [*transcript, 5], 9, 3, known=len(transcript) - 1)
    for _ in range(20):
        engine.turn()
    assert told.tokens == []
    engine.settle()
    assert told.tokens == alone(told)


@pytest.mark.parametrize("ends_after", ["before it lands", "after it lands"])
def test_an_abort_while_a_restore_is_in_flight_gives_each_page_back_once(engine: Stepped, ends_after: str) -> None:
    transcript = offloaded(engine, "nvme")
    told = engine.submit("s", [*transcript, 5], 9, 3, known=len(transcript) - 1)
    while not engine.lanes.reads:
        engine.turn()
    if ends_after == "before it lands":
        assert engine.core.cancel(told.request_id)
        engine.lanes.land_read(0)
    else:
        engine.lanes.land_read(0)
        assert engine.core.cancel(told.request_id)
    engine.core.check_integrity()
    engine.settle()
    assert engine.store.pool.counts().held == 0
    assert told.reason == "cancelled"


def test_a_late_transfer_is_ignored_and_its_pages_are_not_counted(engine: Stepped) -> None:
    transcript = offloaded(engine, "nvme")
    told = engine.submit("s", [*transcript, 5], 9, 3, known=len(transcript) - 1)
    while not engine.lanes.reads:
        engine.turn()
    engine.now_s += 60
    engine.turn()
    engine.lanes.land_read(0)
    engine.settle()
    assert told.tokens == alone(told)
    assert engine.store.counters.restore_timeouts == 1
    assert engine.store.counters.restored_nvme_tokens == 0


def test_a_read_that_is_held_back_beyond_the_deadline_never_writes_into_what_others_were_given(tmp_path: Path) -> None:
    """The disk hangs, the session is computed anew, others take every block that is free; then the disk answers."""
    io = FaultyIo()
    room = PAGE_BYTES + 4096
    with TierStack.open(
        TierConfig(PAGE_BYTES, b"f" * 32, None, 0, tmp_path / "nvme", 64 * room, read_deadline_s=0.05), io=io
    ) as stack:
        engine = Stepped(
            FakeBackend(BLOCKS), BLOCKS, stack, page_bytes=PAGE_BYTES, vocab=VOCAB, context=512, budget=Budget()
        )
        transcript = offloaded(engine, "nvme")
        io.arm(1, Fault.STALL)  # the file is opened, its read hangs
        told = engine.submit("s", [*transcript, 5], 9, 3, known=len(transcript) - 1)
        engine.settle()
        assert told.tokens == alone(told)
        assert engine.store.counters.recomputed_tokens == len(transcript) - 1
        transfers = engine.store.transfers
        assert transfers is not None
        held = transfers.blocks()
        assert transfers.late_pages == len(held) == 4
        others = [engine.submit(f"o{n}", [n + 20] * 30, 40, n + 10) for n in range(3)]
        for _ in range(30):
            engine.turn()
        (read,) = set(transfers._late.values())
        io.disarm()
        read.result(60)  # it has written where it was to write
        engine.lanes.let_go()
        engine.settle()
        assert not transfers.busy
        assert [other.tokens for other in others] == [alone(other) for other in others]
        assert engine.store.pool.counts().held == 0


def test_two_requests_that_want_one_page_share_its_transfer_and_its_place(stack: TierStack) -> None:
    engine = Stepped(FakeBackend(32), 32, stack, page_bytes=PAGE_BYTES, vocab=VOCAB, context=512, budget=Budget())
    transcript = offloaded(engine, "nvme")
    for number in (3, 4):
        engine.submit("s", [*transcript, number], 9, number, known=len(transcript) - 1)
    assert engine.store.transfers is not None
    while not engine.store.transfers.joined:
        engine.turn()
    held = engine.store.pool.counts().held
    assert len(engine.lanes.reads) == 1
    engine.lanes.land_read(0)
    assert engine.store.pool.counts().held == held  # by both
    engine.core.check_integrity()
    assert engine.store.counters.restored_nvme_tokens == len(transcript) - 1  # they were read once
    engine.settle()
    for told in engine.told[1:]:
        assert told.tokens == alone(told)


def test_a_prefetch_that_lands_after_a_drop_brings_nothing_and_pins_nothing(engine: Stepped) -> None:
    offloaded(engine, "nvme")
    engine.kv("pin", "s")
    (receipt, late) = (engine.kv("prefetch", "s", wait=wait) for wait in (False, True))
    read, then = engine.lanes.reads.pop(0)
    arrived = read()
    engine.kv("drop", "s")
    then(arrived)
    engine.core.check_integrity()
    engine.settle()
    assert engine.store.pool.counts().free == BLOCKS
    assert receipt[0]["status"] == "deferred"
    assert late[0]["status"] == "missing"


def test_a_page_that_comes_back_while_it_is_deleted_is_not_taken_for_a_copy(engine: Stepped, stack: TierStack) -> None:
    """It is read, then deleted below, and lands in between: no tier has it now, so the device must not let it go."""
    transcript = offloaded(engine, "host")
    (record,) = engine.store.sessions.all()
    keys, receipts = list(record.keys), []
    engine.submit("s", [*transcript, 5], 2, 3, known=len(transcript))
    engine.turn()
    Reports(engine.core).delete_keys(keys, receipts.append)
    engine.settle()
    assert receipts[0]["status"] == "accepted"
    here = [key for key in record.keys if engine.store.pool.find(key) is not None]
    assert here
    for key, place in zip(here, stack.lookup(here), strict=True):
        assert place is not None or not engine.store.pool.is_clean(key)
