"""Steps that run ahead of their pages: the same bits, and nothing of them where a page does not come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.scheduler import Budget
from kvtier import TierConfig, TierStack
from kvtier.faults import Fault, FaultyIo
from tests.engine.conftest import Loaded
from tests.engine.stepped import LogitsLog, ManualLanes, Stepped, StreamLanes

BLOCKS = 24
PROMPT = [(11 * at + 5) % 200 + 3 for at in range(100)]
RESULT = [(7 * at + 2) % 200 + 3 for at in range(40)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few pages of two layers are enough, and each layer is a stripe."""
    monkeypatch.setattr("engine.ahead.LEAST_PAGES", 2)
    monkeypatch.setattr("engine.transfers.STRIPE_BYTES", 1)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> LogitsLog:
    return LogitsLog(monkeypatch)


@pytest.fixture
def io() -> FaultyIo:
    return FaultyIo()


@pytest.fixture
def stack(tiny: Loaded, tmp_path: Path, io: FaultyIo) -> Iterator[TierStack]:
    size = tiny.facts.page_bytes("bf16")
    with TierStack.open(
        TierConfig(size, b"f" * 32, None, 0, tmp_path / "nvme", 1 << 22, read_threads=3), io=io
    ) as opened:
        yield opened
        io.disarm()


def engine_of(tiny: Loaded, stack: TierStack | None, lanes: ManualLanes) -> Stepped:
    backend: Any = tiny.backend("cpu", "bf16", BLOCKS)
    backend.overlaps = True
    size, vocab = tiny.facts.page_bytes("bf16"), tiny.facts.vocab
    return Stepped(
        backend, BLOCKS, stack, page_bytes=size, vocab=vocab, context=512, budget=Budget(prefill_alone=64), lanes=lanes
    )


def paused(engine: Stepped) -> list[int]:
    """A session whose pages lie on NVMe only, the last one partial; returns its transcript."""
    first = engine.submit("s", PROMPT, 5, 1)
    engine.settle()
    if engine.stack is not None:
        engine.kv("offload", "s", tier="nvme")
        engine.settle()
        assert not [key for key in engine.store.sessions.all()[0].keys if engine.store.pool.find(key) is not None]
    return [*PROMPT, *first.tokens]


def returned(engine: Stepped, transcript: list[int], result: list[int]) -> Any:
    told = engine.submit("s", [*transcript, *result], 6, 2, known=len(transcript) - 1)
    engine.settle()
    assert told.reason == "length"
    return told


@pytest.fixture
def stayed(tiny: Loaded, log: LogitsLog) -> tuple[list[int], list[int]]:
    """The transcript, and what a session says that was never evicted."""
    engine = engine_of(tiny, None, ManualLanes())
    transcript = paused(engine)
    return transcript, returned(engine, transcript, RESULT).tokens


@pytest.mark.parametrize("lanes", [ManualLanes, StreamLanes])
def test_computed_while_the_pages_come_is_computed_after_they_came_is_never_evicted(
    tiny: Loaded, stack: TierStack, stayed: tuple[list[int], list[int]], lanes: type[ManualLanes]
) -> None:
    engine = engine_of(tiny, stack, lanes())
    assert paused(engine) == stayed[0]
    told = returned(engine, *[stayed[0], RESULT])
    assert told.tokens == stayed[1]  # and their logits, bit by bit: see LogitsLog
    counters = engine.store.counters
    assert (counters.ran_ahead, counters.thrown_away) == (int(lanes is StreamLanes), 0)
    assert (counters.restored_nvme_tokens, counters.recomputed_tokens) == (len(stayed[0]) - 1, 0)
    assert told.kinds[:2] == ["prefill", "tokens"]
    assert engine.store.pool.counts().held == 0


def test_a_result_longer_than_a_step_goes_on_as_usual(
    tiny: Loaded, stack: TierStack, log: LogitsLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ahead.AHEAD_TOKENS", 20)
    never = engine_of(tiny, None, ManualLanes())
    transcript = paused(never)
    expected = returned(never, transcript, RESULT * 2).tokens
    engine = engine_of(tiny, stack, StreamLanes())
    paused(engine)
    assert returned(engine, transcript, RESULT * 2).tokens == expected
    assert engine.store.counters.ran_ahead == 1


def test_a_bit_that_flipped_in_the_last_stripe_of_the_last_page_costs_the_step_and_no_more(
    tiny: Loaded, stack: TierStack, tmp_path: Path, stayed: tuple[list[int], list[int]]
) -> None:
    engine = engine_of(tiny, stack, StreamLanes())
    paused(engine)
    (path,) = (tmp_path / "nvme").glob("??/*.seg")
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    told = returned(engine, *[stayed[0], RESULT])
    assert told.tokens == stayed[1]
    counters = engine.store.counters
    assert (counters.ran_ahead, counters.thrown_away) == (0, 1)
    whole = (len(stayed[0]) - 1) // 16 * 16
    assert counters.restored_nvme_tokens == whole
    assert counters.recomputed_tokens == len(stayed[0]) - 1 - whole
    assert stack.stats().nvme.quarantined == 1
    assert engine.store.pool.counts().held == 0


def test_a_read_that_stalls_is_given_up_and_its_blocks_come_back_when_it_ends(
    tiny: Loaded, stack: TierStack, io: FaultyIo, stayed: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.transfers.STREAM_DEADLINE_S", 0.05)
    engine = engine_of(tiny, stack, StreamLanes())
    paused(engine)
    io.arm(4, Fault.STALL)
    told = returned(engine, *[stayed[0], RESULT])
    assert io.hit is not None
    assert told.tokens == stayed[1]
    counters, transfers = engine.store.counters, engine.store.transfers
    assert (counters.ran_ahead, counters.thrown_away) == (0, 1)
    assert counters.recomputed_tokens > 0
    assert transfers is not None
    assert transfers.late_pages > 0
    late = set(transfers._late.values())
    io.disarm()
    for read in late:
        read.result(60)
    engine.lanes.let_go()
    engine.core.check_integrity()
    assert engine.store.pool.counts().held == 0


@pytest.mark.parametrize("ends", ["cancel", "drop"])
def test_an_end_before_the_pages_have_verified_leaves_nothing_of_the_step(
    tiny: Loaded, stack: TierStack, stayed: tuple[list[int], list[int]], ends: str
) -> None:
    engine = engine_of(tiny, stack, StreamLanes())
    paused(engine)
    told = engine.submit("s", [*stayed[0], *RESULT], 6, 2, known=len(stayed[0]) - 1)
    engine.turn()  # the step has run; nobody knows yet what it read
    assert told.tokens == []
    assert engine.store.counters.ran_ahead == 0
    if ends == "cancel":
        engine.core.cancel(told.request_id)
    else:
        engine.kv("drop", "s")
    engine.core.check_integrity()
    engine.settle()
    assert told.reason == "cancelled"
    assert engine.store.counters.ran_ahead == 0
    assert engine.store.pool.counts().held == 0
    if ends == "drop":
        assert engine.store.pool.counts().free == BLOCKS
    else:
        assert returned(engine, *[stayed[0], RESULT]).tokens == stayed[1]


def test_nothing_runs_ahead_beside_others(tiny: Loaded, stack: TierStack, stayed: tuple[list[int], list[int]]) -> None:
    engine = engine_of(tiny, stack, StreamLanes())
    paused(engine)
    other = engine.submit("o", [9] * 20, 40, 7)
    engine.turn()
    told = returned(engine, *[stayed[0], RESULT])
    assert told.tokens == stayed[1]
    assert other.reason == "length"
    assert engine.store.counters.ran_ahead == 0
