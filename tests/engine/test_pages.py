"""The books of the device pool."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import PageError
from engine.pages import PagePool


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def filled(pool: PagePool, number: int, *, clean: bool = False) -> int:
    """A cached page of that key."""
    (taken,) = pool.allocate(1)
    pool.bind(taken.block, key(number), clean=clean)
    pool.release([taken.block])
    return taken.block


def test_a_released_page_without_a_key_is_free_and_with_one_is_cached() -> None:
    pool = PagePool(2)
    taken = pool.allocate(2)
    pool.bind(taken[0].block, key(1))
    pool.release([t.block for t in taken])
    assert (pool.counts().free, pool.counts().cached_dirty) == (1, 1)


def test_clean_pages_are_reused_before_older_dirty_ones() -> None:
    pool = PagePool(3)
    filled(pool, 1)
    filled(pool, 2, clean=True)
    filled(pool, 3)
    assert [taken.evicted for taken in pool.allocate(3)] == [key(2), key(1), key(3)]


def test_an_eviction_says_whether_a_tier_has_the_page() -> None:
    pool = PagePool(2)
    filled(pool, 1)
    filled(pool, 2, clean=True)
    assert [taken.clean for taken in pool.allocate(2)] == [True, False]


def test_a_page_that_is_used_again_is_evicted_last() -> None:
    pool = PagePool(2)
    filled(pool, 1)
    filled(pool, 2)
    block = pool.acquire(key(1))
    assert block is not None
    pool.release([block])
    assert [taken.evicted for taken in pool.allocate(2)] == [key(2), key(1)]


def test_allocating_more_than_there_is_takes_nothing() -> None:
    pool = PagePool(2)
    with pytest.raises(PageError, match="3 pages are wanted and 2 of 2"):
        pool.allocate(3)
    assert pool.available == 2


def test_a_second_page_of_the_same_key_stays_without_one_and_is_freed() -> None:
    pool = PagePool(2)
    first = filled(pool, 1)
    (twin,) = pool.allocate(1)
    assert not pool.bind(twin.block, key(1))
    pool.release([twin.block])
    assert pool.find(key(1)) == first
    assert pool.counts().free == 1


def test_a_page_that_grows_takes_its_new_key_and_is_dirty_again() -> None:
    pool = PagePool(1)
    (taken,) = pool.allocate(1)
    pool.bind(taken.block, key(1), clean=True)
    pool.bind(taken.block, key(2))
    assert pool.find(key(1)) is None
    assert not pool.is_clean(key(2))


def test_forgetting_a_held_page_frees_it_only_with_its_last_holder() -> None:
    pool = PagePool(1)
    (taken,) = pool.allocate(1)
    pool.bind(taken.block, key(1))
    assert pool.forget(key(1))
    assert pool.available == 0
    pool.release([taken.block])
    assert pool.counts().free == 1


def test_releasing_what_nobody_holds_is_refused() -> None:
    pool = PagePool(1)
    with pytest.raises(PageError, match="nobody holds"):
        pool.release([0])


def test_match_counts_leading_pages_only() -> None:
    pool = PagePool(3)
    filled(pool, 1)
    filled(pool, 3)
    assert pool.match([key(1), key(2), key(3)]) == 1


class Books(RuleBasedStateMachine):
    """Any order of moves keeps the conservation law."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6)
        self.held: list[int] = []

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.available:
            self.held += [taken.block for taken in self.pool.allocate(count)]
        else:
            with pytest.raises(PageError):
                self.pool.allocate(count)

    @rule(number=st.integers(0, 8))
    def acquire(self, number: int) -> None:
        block = self.pool.acquire(key(number))
        if block is not None:
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=st.integers(0, 8), clean=st.booleans())
    def bind(self, data: st.DataObject, number: int, clean: bool) -> None:
        self.pool.bind(data.draw(st.sampled_from(self.held)), key(number), clean=clean)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release([block])

    @rule(number=st.integers(0, 8), clean=st.booleans())
    def mark(self, number: int, clean: bool) -> None:
        self.pool.mark(key(number), clean=clean)

    @rule(number=st.integers(0, 8))
    def forget(self, number: int) -> None:
        self.pool.forget(key(number))

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity()
        assert self.pool.counts().held == len(set(self.held))


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase
