"""Pages from the tiers into blocks, step by step: a test decides what a read brings, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from engine.backends.moves import DONE
from engine.copies import Staged
from engine.pages import PagePool
from engine.transfers import Page, Transfers, Waiter
from kvtier import Landed, Tier, Wanted
from tests.engine.fakes import PAGE_BYTES, FakeBackend
from tests.engine.stepped import ManualLanes

KEYS = [bytes([n]) * 32 for n in range(6)]
BLOCKS = 8


def content(key: bytes) -> bytes:
    return key * (PAGE_BYTES // 32)


class ScriptedStack:
    """Has every page but those that are `gone`; reads of `late` ones do not end before the test says so."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.gone: set[bytes] = set()
        self.late: dict[bytes, Future[None]] = {}
        self.rooms: dict[bytes, memoryview] = {}

    def read_into(self, wanted: Sequence[Wanted]) -> Landed:
        self.asked.append([key for key, _ in wanted])
        self.rooms |= dict(wanted)
        for key, room in wanted:
            room[:] = content(key) if key not in self.gone else b"\xee" * PAGE_BYTES
        here = [key for key, _ in wanted if key not in self.gone and key not in self.late]
        return Landed(dict.fromkeys(here, Tier.NVME), {key: self.late[key] for key, _ in wanted if key in self.late})


class Rig:
    """Transfers over a pool of a few blocks."""

    def __init__(self) -> None:
        self.backend, self.pool, self.lanes, self.stack = FakeBackend(BLOCKS), PagePool(BLOCKS), ManualLanes(), None
        self.scripted = ScriptedStack()
        self.staged: dict[bytes, Staged] = {}
        self.calls: list[Waiter] = []
        fake: Any = self.scripted
        lanes: Any = self.lanes
        self.transfers = Transfers(fake, self.staged, lanes, self)

    def take(self) -> int:
        return self.pool.allocate(1)[0].block

    def index(self, block: int, page: Page) -> None:
        self.pool.bind(block, page.key, clean=True)

    def want(self, *numbers: int, hold: bool = True, then: Callable[[Waiter], None] | None = None) -> Waiter:
        waiter = Waiter(then or self.calls.append, {} if hold else None)
        self.transfers.begin([Page(KEYS[number], 16, b"salt") for number in numbers], waiter)
        return waiter

    def bytes_of(self, key: bytes) -> bytes | None:
        block = self.pool.find(key)
        return None if block is None else bytes(self.backend.page(block))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_page_is_read_straight_into_its_block_and_held_by_whoever_waited(rig: Rig) -> None:
    waiter = rig.want(0, 1)
    assert waiter.waiting == {*KEYS[:2]}
    assert waiter.taking == len(rig.transfers.blocks()) == 2
    assert rig.pool.find(KEYS[0]) is None  # nobody finds it before it has verified
    rig.lanes.land_read(0)
    assert rig.calls == [waiter]
    assert (waiter.waiting, waiter.taking, rig.transfers.blocks()) == (set(), 0, [])
    assert waiter.tiers == dict.fromkeys(KEYS[:2], Tier.NVME)
    for key in KEYS[:2]:
        assert waiter.held is not None
        assert waiter.held[key] == rig.pool.find(key)
        assert rig.bytes_of(key) == content(key)
        assert rig.pool.is_clean(key)
    rig.pool.check_integrity()


def test_a_page_that_is_on_its_way_is_not_read_again(rig: Rig) -> None:
    first, second = rig.want(0, 1, 2), rig.want(1, 2, 3)
    assert rig.transfers.joined == 2
    assert rig.pool.counts().held == 4
    rig.lanes.land_read(1)
    assert second.waiting == {*KEYS[1:3]}
    rig.lanes.land_read(0)
    assert rig.scripted.asked == [[KEYS[3]], KEYS[:3]]
    assert first.held is not None
    assert second.held is not None
    assert second.held.keys() == {*KEYS[1:4]}
    assert first.held[KEYS[1]] == second.held[KEYS[1]]
    assert second.tiers == {KEYS[3]: Tier.NVME}  # the others were read for the first one


def test_when_it_has_landed_the_next_one_finds_it_on_the_device(rig: Rig) -> None:
    rig.want(0)
    rig.lanes.land_read(0)
    again = rig.want(0)
    assert not again.waiting
    assert again.held == {KEYS[0]: rig.pool.find(KEYS[0])}
    assert not rig.lanes.reads


@pytest.mark.parametrize("lost", [True, False])
def test_a_page_that_does_not_come_is_never_indexed_and_its_block_is_zeroed_and_free(rig: Rig, lost: bool) -> None:
    rig.scripted.gone = {KEYS[1]}
    first, second = rig.want(0, 1), rig.want(1)
    rig.lanes.land_read(0, lost=lost)
    came = set() if lost else {KEYS[0]}
    assert first.held is not None
    assert first.held.keys() == came
    assert second.held == {}
    assert rig.calls == [first, second]
    assert rig.pool.find(KEYS[1]) is None
    assert rig.pool.counts().free == BLOCKS - len(came)
    free = [block for block in range(BLOCKS) if not rig.pool.refs(block)]
    assert all(bytes(rig.backend.page(block)) == bytes(PAGE_BYTES) for block in free)


def test_a_block_that_a_late_read_may_still_write_into_is_nobodys_until_the_read_has_ended(rig: Rig) -> None:
    rig.scripted.late[KEYS[0]] = Future()
    waiter = rig.want(0, 1)
    rig.lanes.land_read(0)
    assert waiter.held is not None
    assert waiter.held.keys() == {KEYS[1]}
    (block,) = rig.transfers.blocks()
    assert rig.transfers.late_pages == 1
    others = [one.block for one in rig.pool.allocate(BLOCKS - 2)]
    assert block not in others
    assert rig.pool.available == 0
    before = [bytes(rig.backend.page(other)) for other in others]
    rig.scripted.rooms[KEYS[0]][:] = b"\xdd" * PAGE_BYTES  # the read comes to its end after all
    rig.scripted.late[KEYS[0]].set_result(None)
    rig.lanes.let_go()
    assert [bytes(rig.backend.page(other)) for other in others] == before
    assert bytes(rig.backend.page(block)) == bytes(PAGE_BYTES)
    assert [one.block for one in rig.pool.allocate(1)] == [block]
    assert rig.pool.find(KEYS[0]) is None
    assert not rig.transfers.busy


def test_a_flight_that_nobody_waits_for_any_more_lands_as_a_cached_page(rig: Rig) -> None:
    waiter = rig.want(0)
    rig.transfers.give_up(waiter)
    assert rig.pool.counts().held == 1
    rig.lanes.land_read(0)
    assert rig.calls == []
    assert (waiter.held, waiter.tiers) == ({}, {})
    assert rig.pool.counts().cached_clean == 1


def test_a_page_that_is_forgotten_while_it_flies_comes_only_for_those_who_wait(rig: Rig) -> None:
    rig.transfers.give_up(rig.want(0, 1))
    waiter = rig.want(1)
    rig.transfers.forget(KEYS[0])
    rig.transfers.forget(KEYS[1])
    rig.lanes.land_read(0)
    assert waiter.held is not None
    assert waiter.held.keys() == {KEYS[1]}
    assert rig.pool.find(KEYS[0]) is None
    assert rig.pool.counts().free == BLOCKS - 1


def test_a_page_that_was_computed_meanwhile_keeps_its_block(rig: Rig) -> None:
    waiter = rig.want(0)
    (computed,) = (one.block for one in rig.pool.allocate(1))
    rig.pool.bind(computed, KEYS[0])
    rig.lanes.land_read(0)
    assert waiter.held == {KEYS[0]: computed}
    assert rig.pool.refs(computed) == 2
    assert rig.pool.counts().free == BLOCKS - 1


def test_whoever_only_wants_pages_on_the_device_holds_none(rig: Rig) -> None:
    waiter = rig.want(0, 1, hold=False)
    rig.lanes.land_read(0)
    assert rig.calls == [waiter]
    assert rig.pool.counts().cached_clean == 2
    assert waiter.tiers.keys() == {*KEYS[:2]}


def test_pages_that_have_no_room_stay_where_they_are(rig: Rig) -> None:
    rig.pool.allocate(BLOCKS - 2)
    waiter = rig.want(0, 1, 2)
    assert waiter.waiting == {*KEYS[:2]}
    rig.lanes.land_read(0)
    assert waiter.held is not None
    assert waiter.held.keys() == {*KEYS[:2]}
    assert not rig.want(3).waiting


def test_a_page_that_is_still_being_written_is_taken_from_its_copy(rig: Rig) -> None:
    rig.staged[KEYS[1]] = Staged(b"staged".ljust(PAGE_BYTES, b"\0"), DONE)
    waiter = rig.want(0, 1)
    rig.lanes.land_read(0)
    assert rig.scripted.asked == [[KEYS[0]]]
    assert rig.bytes_of(KEYS[1]) == rig.staged[KEYS[1]].page
    assert waiter.tiers == {KEYS[0]: Tier.NVME, KEYS[1]: Tier.HOST}
