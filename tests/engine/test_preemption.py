"""When the pool is short: who gives way, where the pages go, and what is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.live import Guides
from engine.request import parse_generate
from engine.scheduler import Budget
from kvtier import TierConfig, TierStack
from tests.engine.fakes import PAGE_BYTES, VOCAB, FakeBackend
from tests.engine.stepped import Stepped

FEW = 8  # pages; two requests of seventy tokens do not fit


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Stepped]:
    stack = tiers(tmp_path)
    yield stepped(stack)
    stack.close()


def stepped(stack: TierStack | None, blocks: int = FEW) -> Stepped:
    return Stepped(FakeBackend(blocks), blocks, stack, page_bytes=PAGE_BYTES, vocab=VOCAB, context=512, budget=Budget())


def tiers(root: Path) -> TierStack:
    return TierStack.open(
        TierConfig(PAGE_BYTES, b"f" * 32, root / "arena", 64 * (PAGE_BYTES + 4096), root / "nvme", 64 << 12)
    )


def test_a_preempted_request_goes_on_with_the_same_tokens_and_says_what_happened(short: Stepped) -> None:
    told = [short.submit(f"s{i}", [i + 3] * 20, 60, i) for i in range(3)]
    short.settle()
    wide = Stepped(FakeBackend(64), 64, None, page_bytes=PAGE_BYTES, vocab=VOCAB, context=512, budget=Budget())
    for one in told:
        again = wide.submit(one.session, one.prompt, one.count, one.sampling.seed)
        wide.settle()
        assert one.tokens == again.tokens
    counters = short.store.counters
    assert counters.preemptions > 0
    assert counters.swapped_pages > 0
    kinds = [kind for one in told for kind in one.kinds]
    assert kinds.count("preempted") == kinds.count("resumed") > 0
    assert "preempted" not in told[0].kinds  # the oldest is never sent back


def test_the_time_of_prefill_is_that_before_the_first_token_however_often_it_was_sent_back(short: Stepped) -> None:
    told = [short.submit(f"s{i}", [i + 3] * 20, 90, i) for i in range(2)]
    while short.core.scheduler.requests():
        short.now_s += 1.0
        short.round()
    assert "preempted" in told[1].kinds
    assert all(0 <= one.end["prefill_ms"] <= one.end["ttft_ms"] < one.end["decode_ms"] for one in told)


def test_a_preempted_requests_pages_come_back_from_the_host_tier(short: Stepped) -> None:
    told = [short.submit(f"s{i}", [i + 3] * 20, 90, i) for i in range(2)]
    short.settle()
    assert "preempted" in told[1].kinds
    counters = short.store.counters
    assert counters.restored_host_tokens > 0
    assert counters.recomputed_tokens == 0


def test_pages_that_are_still_on_their_way_to_the_host_tier_are_not_recomputed(short: Stepped) -> None:
    told = [short.submit(f"s{i}", [i + 3] * 20, 90, i) for i in range(2)]
    while any(one.reason is None for one in told):
        short.turn()
        while short.lanes.reads:
            short.lanes.land_read(0)  # no write lands
    assert "resumed" in told[1].kinds
    assert short.store.counters.recomputed_tokens == 0
    short.settle()
    assert short.store.copies is not None
    assert not short.store.copies.staged


def test_without_tiers_a_preempted_request_is_recomputed_and_counted() -> None:
    engine = stepped(None)
    told = [engine.submit(f"s{i}", [i + 3] * 20, 90, i) for i in range(2)]
    engine.settle()
    assert [t.reason for t in told] == ["length", "length"]
    assert engine.store.counters.preemptions > 0
    assert engine.store.counters.recomputed_tokens > 0


def test_every_page_held_by_requests_that_wait_for_each_other_is_not_possible(tmp_path: Path) -> None:
    """Eight requests that all fit alone and want the whole pool in the end: each ends, in bounded steps."""
    stack = tiers(tmp_path)
    try:
        engine = stepped(stack)
        told = [engine.submit(f"s{i}", [i + 3] * 17, 90, i) for i in range(8)]
        engine.settle(most=20_000)
        assert [t.reason for t in told] == ["length"] * 8
        assert engine.store.counters.preemptions > 0
    finally:
        stack.close()


def test_a_request_that_was_sent_back_can_be_cancelled(tmp_path: Path) -> None:
    stack = tiers(tmp_path)
    try:
        engine = stepped(stack)
        first, second = (engine.submit(f"s{i}", [i + 3] * 20, 90, i) for i in range(2))
        while "preempted" not in second.kinds:
            engine.round()
        assert engine.core.cancel(second.request_id)
        engine.settle()
        assert (first.reason, second.reason) == ("length", "cancelled")
        assert engine.store.pool.counts().held == 0
    finally:
        stack.close()


def test_preemption_in_the_middle_of_a_restore_gives_its_pages_back(tmp_path: Path) -> None:
    stack = tiers(tmp_path)
    try:
        engine = stepped(stack)
        before = engine.submit("back", [9] * 60, 2, 5)
        engine.settle()
        engine.kv("offload", "back", tier="nvme")
        engine.settle()
        elder = engine.submit("elder", [4] * 20, 100, 6)
        while not elder.tokens:
            engine.round()
        back = engine.submit("back", [*before.prompt, *before.tokens, 7], 3, 7, known=61)
        while not engine.core.store.counters.preemptions:
            engine.turn()  # the transfer never lands, the elder grows
        engine.settle()
        assert (elder.reason, back.reason) == ("length", "length")
        assert "preempted" not in back.kinds  # it had not begun: nothing was taken from it
    finally:
        stack.close()


def sent_back_in_prefill() -> list[dict[str, Any]]:
    """What a request says that wants no pages found, and is sent back after its first one: another session has all."""
    engine = Stepped(FakeBackend(12), 12, None, page_bytes=PAGE_BYTES, vocab=VOCAB, context=512, budget=Budget(16, 16))
    engine.now_s = 1.0
    prompt = [7 * i % 50 + 3 for i in range(96)]
    engine.submit("other", prompt, 1, 1)
    engine.settle()
    frames: list[dict[str, Any]] = []
    message = {"request_id": "q", "session": "s", "token_ids": prompt, "max_tokens": 4, "kv_source": "none"}
    engine.core.submit(parse_generate(message), Guides(), frames.append)
    (request,) = engine.core.scheduler.requests()
    while request.computed < 16:
        engine.turn()
    engine.core._preempt(engine.core._live["q"])
    engine.settle()
    return frames


def test_what_was_not_to_be_found_is_not_found_after_a_preemption_either() -> None:
    frames = sent_back_in_prefill()
    assert [frame["device"] for frame in frames if "device" in frame] == [0, 16]


def test_a_request_that_is_sent_back_before_its_first_token_is_resumed_not_begun_again() -> None:
    frames = sent_back_in_prefill()
    assert [frame["type"] for frame in frames[:3]] == ["prefill", "preempted", "resumed"]
    assert [(f["recomputed"], f["computed"]) for f in frames if "device" in f] == [(0, 96), (0, 80)]
