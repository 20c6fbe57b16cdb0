"""Sharing pages: nothing is copied until somebody writes, and what is allocated but unused is counted."""

from __future__ import annotations

import pytest

from engine.facts import PAGE_SIZE
from engine.scheduler import Budget
from tests.engine.fakes import PAGE_BYTES, VOCAB, FakeBackend
from tests.engine.stepped import Stepped

PROMPT = [(5 * i + 3) % 50 + 3 for i in range(37)]


@pytest.fixture
def engine() -> Stepped:
    return Stepped(FakeBackend(64), 64, None, page_bytes=PAGE_BYTES, vocab=VOCAB, context=512, budget=Budget())


def run_until(engine: Stepped, tokens: int) -> None:
    while len(engine.told[0].tokens) < tokens:
        engine.turn()


def test_a_twin_of_a_running_request_shares_its_partial_page_without_a_copy(engine: Stepped) -> None:
    first = engine.submit("a", PROMPT, 30, 1)
    run_until(engine, 1)
    engine.submit("b", PROMPT, 30, 2)
    held = engine.store.pool.counts().held
    engine.core._plan()  # admits; nothing has run yet
    engine.core._restores.begin(engine.core._live["q1"], engine.core._live.values())
    twin = engine.core.scheduler.requests()[1]
    assert engine.store.pool.counts().held == held
    assert twin.blocks == engine.core.scheduler.requests()[0].blocks
    assert engine.store.counters.copied_on_write == 0
    assert first.reason is None


def test_the_first_write_after_a_fork_copies_one_page_and_only_one(engine: Stepped) -> None:
    first = engine.submit("a", PROMPT, 40, 1)
    run_until(engine, 2)
    second = engine.submit("b", PROMPT, 40, 2)
    engine.settle()
    assert engine.store.counters.copied_on_write == 1
    alone = Stepped(FakeBackend(64), 64, None, page_bytes=PAGE_BYTES, vocab=VOCAB, context=512, budget=Budget())
    for told in (first, second):
        again = alone.submit(told.session, told.prompt, told.count, told.sampling.seed)
        alone.settle()
        assert told.tokens == again.tokens


def test_a_fork_of_forks_holds_each_shared_page_once(engine: Stepped) -> None:
    engine.submit("a", [*PROMPT, *PROMPT, *PROMPT][:100], 30, 1)
    run_until(engine, 1)
    alone = engine.store.pool.counts().held
    for number in range(2, 8):
        engine.submit(f"s{number}", [*PROMPT, *PROMPT, *PROMPT][:100], 30, number)
    for _ in range(3):
        engine.turn()
    assert len(engine.core.scheduler.requests()) == 7
    assert engine.store.pool.counts().held == alone + 6  # one page of its own for each


def test_an_exact_tail_is_found_on_the_device_and_nothing_is_counted_twice(engine: Stepped) -> None:
    """The last partial page overlaps one that is here already: device + computed is the prompt, to the token."""
    first = engine.submit("a", PROMPT, 3, 1)
    engine.settle()
    transcript = [*first.prompt, *first.tokens]
    before = (engine.store.counters.prefix_hit_tokens, engine.store.counters.computed_tokens)
    engine.submit("a", [*transcript, 7], 1, 2, known=len(transcript))
    engine.settle()
    hits, computed = engine.store.counters.prefix_hit_tokens, engine.store.counters.computed_tokens
    assert hits - before[0] == len(transcript) - 1
    assert hits - before[0] + computed - before[1] + engine.store.counters.recomputed_tokens == len(transcript) + 1


@pytest.mark.parametrize(("length", "allocated"), [(1, 16), (16, 16), (17, 32), (300, 304)])
def test_waste_is_reported_as_it_is(engine: Stepped, length: int, allocated: int) -> None:
    engine.submit("a", [7] * length, 40, 1)
    while engine.core.scheduler.requests()[0].computed < length:
        engine.turn()
    waste = engine.store.waste(engine.core.scheduler.requests())
    assert (waste.allocated_tokens, waste.used_tokens) == (allocated, length)


def test_a_shared_page_is_wasted_once(engine: Stepped) -> None:
    engine.submit("a", PROMPT, 30, 1)
    run_until(engine, 1)
    engine.submit("b", PROMPT, 30, 2)
    engine.core._plan()
    engine.core._restores.begin(engine.core._live["q1"], engine.core._live.values())
    waste = engine.store.waste(engine.core.scheduler.requests())
    assert waste.allocated_tokens == 3 * PAGE_SIZE
    assert waste.used_tokens == len(PROMPT)
