"""The contract of `PageStore`, over every implementation, the fake included."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier import PageStore, S3Place
from kvtier.fileops import Buffer
from tests.kvtier.media import KINDS, Medium
from tests.kvtier.support import (
    PAGE,
    SALT_ID,
    key_of,
    keys_of,
    landed,
    numbers_in,
    pages_of,
    payload_of,
    rooms_of,
    smooth_of,
)


@pytest.fixture(params=KINDS)
def medium(request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[], S3Place]) -> Medium:
    return Medium(request.param, tmp_path, new_bucket)


def put(store: PageStore, *numbers: int) -> tuple[int, int]:
    stored = store.put(pages_of(*numbers), epoch=1, salt_id=SALT_ID)
    return stored.present, stored.written


def got(store: PageStore, *numbers: int) -> list[bytes | None]:
    found = store.get(keys_of(*numbers))
    return [bytes(found[key]) if (key := key_of(number)) in found else None for number in numbers]


def test_what_comes_back_is_what_was_put_and_nothing_else(medium: Medium) -> None:
    with medium.open() as store:
        assert put(store, 1, 2, 3) == (3, 3)
        assert got(store, 3, 9, 1) == [payload_of(3), None, payload_of(1)]
        assert store.lookup(keys_of(1, 9)) == [True, False]
        assert numbers_in(store.keys()) == {1, 2, 3}
        store.check_integrity()


def test_pages_are_read_into_the_memory_of_whoever_wants_them(medium: Medium) -> None:
    with medium.open() as store:
        put(store, 1, 2, 3)
        rooms = rooms_of(3, 9, 1)
        filled = store.read_into(rooms)
        assert landed(rooms, filled.keys) == [payload_of(3), None, payload_of(1)]
        assert not filled.late
        counts = store.counts()
        assert (counts.hits, counts.misses) == (2, 1)
        assert store.read_into([]).keys == set()
        store.check_integrity()


def test_pages_that_compress_come_back_byte_equal(medium: Medium) -> None:
    pages = [(key_of(number), smooth_of(number)) for number in range(6)]
    with medium.open() as store:
        store.put(pages, epoch=1, salt_id=SALT_ID)
        assert {key: bytes(page) for key, page in store.get(keys_of(*range(6))).items()} == dict(pages)
        store.check_integrity()


def test_pages_outlive_the_process_that_put_them(medium: Medium) -> None:
    with medium.open() as store:
        put(store, 1, 2)
        used = store.counts().used_bytes
    with medium.open() as again:
        assert got(again, 1, 2) == [payload_of(1), payload_of(2)]
        assert again.counts().used_bytes == used
        again.check_integrity()


def test_a_key_that_is_there_keeps_its_bytes(medium: Medium) -> None:
    with medium.open() as store:
        put(store, 1)
        stored = store.put([(key_of(1), payload_of(2))], epoch=2, salt_id=SALT_ID)
        assert (stored.present, stored.written) == (1, 0)
        assert got(store, 1) == [payload_of(1)]


def test_exactly_the_deleted_pages_are_gone_and_can_be_put_again(medium: Medium) -> None:
    with medium.open() as store:
        put(store, 1, 2, 3, 4)
        assert store.delete(keys_of(2, 77)) == 1
        assert got(store, 1, 2, 3, 4) == [payload_of(1), None, payload_of(3), payload_of(4)]
    with medium.open() as again:
        assert numbers_in(again.keys()) == {1, 3, 4}
        assert put(again, 2)[0] == 1
        assert got(again, 2) == [payload_of(2)]
        again.check_integrity()


def test_deleting_everything_leaves_no_pages(medium: Medium) -> None:
    with medium.open() as store:
        empty = store.counts().used_bytes
        put(store, *range(10))
        assert store.delete(keys_of(*range(10))) == 10
        store.delete(keys_of(1))  # a shared store removes what was marked before
        assert store.keys() == set()
        assert store.counts().used_bytes == empty
        store.check_integrity()


def test_the_budget_is_never_passed_and_a_put_says_why_it_was_clipped(medium: Medium) -> None:
    with medium.open() as store:
        for start in range(0, 120, 5):
            numbers = range(start, start + 5)
            stored = store.put(pages_of(*numbers), epoch=1, salt_id=SALT_ID)
            assert stored.present == sum(store.lookup(keys_of(*numbers)))
            assert stored.present == 5 or "budget" in stored.detail
            assert store.counts().used_bytes <= medium.budget_bytes
        assert store.counts().evicted > 0
        for number in numbers_in(store.keys()):
            assert got(store, number) == [payload_of(number)]
        store.check_integrity()


def test_a_batch_larger_than_the_budget_keeps_its_beginning(medium: Medium) -> None:
    with medium.open() as store:
        stored = store.put(pages_of(*range(300)), epoch=1, salt_id=SALT_ID)
        assert 0 < stored.present < 300
        assert stored.detail
        assert numbers_in(store.keys(), 300) == set(range(stored.present))
        assert store.counts().used_bytes <= medium.budget_bytes


def test_every_kind_of_buffer_is_stored_as_its_bytes(medium: Medium) -> None:
    kinds: list[Buffer] = [
        payload_of(1),
        bytearray(payload_of(2)),
        memoryview(payload_of(3)),
        memoryview(payload_of(4)).cast("H"),
    ]
    with medium.open() as store:
        store.put(list(zip(keys_of(1, 2, 3, 4), kinds, strict=True)), epoch=1, salt_id=SALT_ID)
        assert got(store, 1, 2, 3, 4) == [payload_of(number) for number in (1, 2, 3, 4)]
        assert all(len(page) == PAGE for page in store.get(keys_of(1, 2, 3, 4)).values())


def test_answers_are_counted(medium: Medium) -> None:
    with medium.open() as store:
        put(store, 1, 2)
        store.get(keys_of(1, 9, 8))
        store.delete(keys_of(2))
        counts = store.counts()
        assert (counts.pages, counts.stored, counts.hits, counts.misses, counts.deleted) == (1, 2, 1, 2, 1)
        assert counts.budget_bytes == medium.budget_bytes


@pytest.mark.parametrize("medium", [kind for kind in KINDS if kind != "fake"], indirect=True)
def test_a_page_with_a_flipped_bit_is_not_among_those_that_were_read(medium: Medium) -> None:
    with medium.open() as store:
        put(store, 1)
        medium.harm()
        put(store, 2)
        rooms = rooms_of(1, 2)
        assert landed(rooms, store.read_into(rooms).keys) == [None, payload_of(2)]
        assert store.counts().quarantined == 1


@pytest.mark.parametrize("medium", [kind for kind in KINDS if kind != "fake"], indirect=True)
def test_a_flipped_bit_is_a_miss_that_is_counted_and_heals_when_the_page_is_put_again(medium: Medium) -> None:
    with medium.open() as store:
        put(store, 1)
        put(store, 2)
        assert medium.harm() == 2
        assert got(store, 1, 2) == [None, None]
        assert store.counts().quarantined == 2
        store.delete(keys_of(9))  # a shared store removes what did not verify
        assert put(store, 1, 2)[0] == 2
        assert got(store, 1, 2) == [payload_of(1), payload_of(2)]
        store.check_integrity()


def test_threads_that_put_read_and_delete_the_same_pages_see_whole_pages_or_misses(medium: Medium) -> None:
    wrong: list[object] = []

    def work(store: PageStore, shift: int) -> None:
        try:
            for turn in range(12):
                numbers = [(turn * 3 + shift + step) % 10 for step in range(4)]
                put(store, *numbers)
                for number, page in zip(numbers, got(store, *numbers), strict=True):
                    if page not in (None, payload_of(number)):
                        wrong.append(number)
                store.delete(keys_of(numbers[0]))
        except Exception as error:  # a thread's error must reach the test
            wrong.append(error)

    with medium.open() as store:
        threads = [threading.Thread(target=work, args=(store, shift)) for shift in (0, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        store.check_integrity()
