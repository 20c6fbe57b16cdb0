from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier import (
    CodecConfig,
    MemoryObjects,
    Objects,
    S3Place,
    SharedConfig,
    Tier,
    TierConfig,
    TierConfigError,
    TierIntegrityError,
    TierStack,
)
from kvtier.codec import Codec, PageForm
from kvtier.collect import page_name
from kvtier.fileops import Buffer
from kvtier.reads import Readers, Threads
from kvtier.segment import segment_bytes
from kvtier.shared import SharedStore
from tests.kvtier.media import Medium, Ring
from tests.kvtier.support import (
    FINGERPRINT,
    PAGE,
    SALT_ID,
    key_of,
    keys_of,
    numbers_in,
    open_stack,
    pages_of,
    payload_of,
)
from tests.kvtier.test_lease import Clock

ONE = segment_bytes(1, PAGE)


class Machine:
    """A shared store opened by one machine, with its own clock and key ring."""

    def __init__(
        self,
        objects: Objects,
        *,
        pages: int = 40,
        fingerprint: bytes = FINGERPRINT,
        codec: CodecConfig | None = None,
        references: Callable[[set[bytes]], set[bytes]] | None = None,
    ) -> None:
        self.clock = Clock()
        self._pool, self._readers = ThreadPoolExecutor(2), Readers(2, 30.0, "test")
        config = SharedConfig(objects, pages * ONE, grace_s=60, refresh_s=1000, lease_s=30)
        form = PageForm(PAGE, fingerprint, Codec(codec or CodecConfig(), PAGE))
        self.store = SharedStore(objects, config, form, Threads(self._readers, self._pool), references, self.clock)

    def put(self, *numbers: int) -> tuple[int, int]:
        stored = self.store.put(pages_of(*numbers), epoch=1, salt_id=SALT_ID)
        return stored.present, stored.written

    def get(self, *numbers: int) -> list[int]:
        found = self.store.get(keys_of(*numbers))
        assert all(bytes(found[key_of(n)]) == payload_of(n) for n in numbers if key_of(n) in found)
        return [number for number in numbers if key_of(number) in found]

    def collect_after(self, seconds: float) -> list[int]:
        self.clock.now += seconds
        return sorted(numbers_in(set(self.store.collect().removed)))

    def close(self) -> None:
        self._readers.close()
        self._pool.shutdown()
        self.store.close()


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def machine(objects: MemoryObjects) -> Iterator[Callable[..., Machine]]:
    opened: list[Machine] = []

    def start(**choices: object) -> Machine:
        opened.append(Machine(objects, **choices))  # type: ignore[arg-type]
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def stored(objects: Objects) -> set[int]:
    return {n for n in range(100) if objects.read(page_name(key_of(n))) is not None}


# --- many machines ---------------------------------------------------------------------------------------


def test_a_page_that_one_machine_shared_is_read_by_another_that_was_open_before(
    machine: Callable[..., Machine],
) -> None:
    one, two = machine(), machine()
    assert one.put(1, 2) == (2, 2)
    assert two.store.lookup(keys_of(1)) == [False]  # from the last listing
    assert two.get(1, 2) == [1, 2]
    assert two.store.lookup(keys_of(1)) == [True]
    two.store.refresh()
    assert numbers_in(two.store.keys()) == {1, 2}


def test_two_machines_that_share_one_page_write_it_once(machine: Callable[..., Machine]) -> None:
    one, two = machine(), machine()
    assert one.put(1) == (1, 1)
    assert two.put(1, 2) == (2, 1)
    assert one.get(1, 2) == [1, 2]


def test_writers_at_once_leave_whole_pages(tmp_path: Path, new_bucket: Callable[[], S3Place]) -> None:
    for kind in ("directory", "s3"):
        medium = Medium(kind, tmp_path, new_bucket)
        with medium.open() as one, medium.open() as two:
            wrote: list[int] = []

            def write(store: object, wrote: list[int] = wrote) -> None:
                assert isinstance(store, SharedStore)
                wrote.append(store.put(pages_of(*range(12)), epoch=1, salt_id=SALT_ID).written)

            threads = [threading.Thread(target=write, args=(store,)) for store in (one, two)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sum(wrote) == 12
            for store in (one, two):
                assert {bytes(page) for page in store.get(keys_of(*range(12))).values()} == {
                    payload_of(number) for number in range(12)
                }


def test_pages_of_another_model_are_misses_and_are_left_alone(
    machine: Callable[..., Machine], objects: MemoryObjects
) -> None:
    machine(fingerprint=b"other").put(1)
    ours = machine()
    assert ours.get(1) == []
    assert ours.store.counts().undecodable == 1
    assert ours.put(1) == (0, 0)
    assert stored(objects) == {1}


# --- mark, grace, recheck --------------------------------------------------------------------------------


def test_a_deleted_page_is_served_no_more_and_goes_after_the_grace(
    machine: Callable[..., Machine], objects: MemoryObjects
) -> None:
    one = machine()
    one.put(1, 2)
    assert one.store.delete(keys_of(1)) == 1
    assert one.get(1, 2) == [2]
    assert one.collect_after(59) == []
    assert stored(objects) == {1, 2}
    assert one.collect_after(1) == [1]
    assert stored(objects) == {2}
    assert list(objects.list("marks/")) == []


def test_only_the_holder_of_the_lease_removes(machine: Callable[..., Machine], objects: MemoryObjects) -> None:
    holder, other = machine(), machine()
    holder.put(1, 2)
    holder.store.collect()
    other.store.refresh()
    assert other.store.delete(keys_of(1)) == 1
    assert other.collect_after(29) == []
    holder.clock.now += 20
    assert holder.collect_after(0) == []  # its grace begins when it sees the mark
    assert other.collect_after(29) == []
    assert holder.collect_after(60) == [1]
    assert stored(objects) == {2}


def test_the_lease_passes_on_and_the_grace_begins_anew(machine: Callable[..., Machine], objects: MemoryObjects) -> None:
    dead, heir = machine(), machine()
    dead.put(1)
    dead.store.delete(keys_of(1))
    heir.store.collect()
    assert heir.collect_after(30) == []
    assert heir.collect_after(20) == []
    assert heir.collect_after(20) == []
    assert heir.collect_after(20) == [1]


def test_a_page_that_is_put_again_within_the_grace_stays(
    machine: Callable[..., Machine], objects: MemoryObjects
) -> None:
    one, two = machine(), machine()
    one.put(1)
    one.store.delete(keys_of(1))
    assert two.put(1) == (1, 0)
    assert one.collect_after(60) == []
    assert (stored(objects), one.get(1), two.get(1)) == ({1}, [1], [1])
    assert list(objects.list("marks/")) == list(objects.list("claims/")) == []
    one.store.delete(keys_of(1))
    one.store.collect()
    assert one.collect_after(60) == [1]


def test_a_page_that_somebody_still_refers_to_is_spared(
    machine: Callable[..., Machine], objects: MemoryObjects
) -> None:
    referred = {key_of(1)}
    one = machine(references=lambda keys: keys & referred)
    one.put(1, 2)
    one.store.delete(keys_of(1, 2))
    assert one.collect_after(60) == [2]
    assert one.get(1) == [1]
    referred.clear()
    one.store.delete(keys_of(1))
    assert one.collect_after(60) == [1]
    assert stored(objects) == set()


def test_a_page_that_did_not_verify_goes_even_if_it_is_wanted(
    machine: Callable[..., Machine], objects: MemoryObjects
) -> None:
    one = machine(references=lambda keys: keys)
    one.put(1)
    raw = bytes(objects.read(page_name(key_of(1))) or b"")
    objects.remove(page_name(key_of(1)))
    objects.create(page_name(key_of(1)), [raw[:-200]])
    assert one.get(1) == []
    assert one.put(1) == (0, 0)
    one.store.collect()
    assert one.collect_after(60) == [1]
    assert one.put(1) == (1, 1)


def test_what_a_killed_collector_left_half_done_is_finished_by_the_next(
    machine: Callable[..., Machine], objects: MemoryObjects
) -> None:
    one = machine()
    one.put(1)
    one.store.delete(keys_of(1))
    objects.remove(page_name(key_of(1)))  # killed between the page and its mark
    assert one.collect_after(60) == [1]
    assert list(objects.list("marks/")) == []
    one.store.check_integrity()


def test_half_written_files_of_dead_writers_are_removed_after_the_grace(tmp_path: Path) -> None:
    with open_stack(tmp_path, shared_bytes=2**20) as stack:
        (tmp_path / "shared" / "incoming" / "half").write_bytes(b"x")
        stack.collect()
        assert stack.stats().shared.swept == 1
        assert list((tmp_path / "shared" / "incoming").iterdir()) == []


def test_a_blob_that_is_too_short_for_a_page_is_never_served_and_goes_after_the_grace(
    machine: Callable[..., Machine], objects: MemoryObjects
) -> None:
    objects.create(page_name(key_of(1)), [b"short"])
    one = machine()
    assert one.store.lookup(keys_of(1)) == [False]
    assert one.store.counts().quarantined == 1
    one.clock.now += 60
    assert numbers_in(set(one.store.collect().removed)) == {1}
    assert one.put(1) == (1, 1)


def test_integrity_notices_a_total_that_is_not_that_of_the_pages(machine: Callable[..., Machine]) -> None:
    one = machine()
    one.put(1, 2)
    one.store.delete(keys_of(2))
    one.store.check_integrity()
    one.store._index._used_bytes += 1
    with pytest.raises(TierIntegrityError, match="bytes are used where pages take"):
        one.store.check_integrity()


def test_many_deletions_cost_few_requests_to_collect() -> None:
    rounds: list[str] = []

    class Counted(MemoryObjects):
        def list(self, prefix: str) -> Iterator[tuple[str, int]]:
            rounds.append(prefix)
            return super().list(prefix)

    with over(Counted()) as one:
        one.put(*range(30))
        for number in range(30):
            one.store.delete(keys_of(number))
        assert rounds.count("marks/") <= 2  # the listing at the start, and one round
        one.clock.now += 60
        one.store.delete(keys_of(99))
        assert one.store.counts().used_bytes == 0


# --- budget ----------------------------------------------------------------------------------------------


def test_a_full_store_marks_the_least_recently_used_and_takes_more_after_the_grace(
    machine: Callable[..., Machine], objects: MemoryObjects
) -> None:
    one = machine(pages=10)
    one.put(*range(10))
    assert one.get(0) == [0]
    assert one.put(20) == (0, 0)
    assert one.store.counts().used_bytes == 10 * ONE
    one.clock.now += 60
    assert one.put(20) == (1, 1)
    assert {0, 20} <= stored(objects)
    assert 1 not in stored(objects)
    assert one.store.counts().used_bytes <= 10 * ONE


def test_the_budget_counts_what_others_wrote(machine: Callable[..., Machine]) -> None:
    machine(pages=10).put(*range(10))
    assert machine(pages=10).put(20) == (0, 0)


def test_a_budget_below_one_page_is_refused(objects: MemoryObjects) -> None:
    with pytest.raises(TierConfigError, match="one page needs"):
        Machine(objects, pages=0)


# --- trouble ---------------------------------------------------------------------------------------------


class BrokenObjects(MemoryObjects):
    """Blobs in memory behind a network that can fail."""

    broken = False

    def _pass(self) -> None:
        if self.broken:
            raise OSError(5, "no route to the store")

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        self._pass()
        return super().create(name, parts)

    def read(self, name: str) -> Buffer | None:
        self._pass()
        return super().read(name)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        self._pass()
        return super().list(prefix)

    def remove(self, name: str) -> None:
        self._pass()
        super().remove(name)


@contextmanager
def over(objects: Objects) -> Iterator[Machine]:
    machine = Machine(objects)
    try:
        yield machine
    finally:
        machine.close()


def test_a_store_that_does_not_answer_costs_pages_and_nothing_else() -> None:
    objects = BrokenObjects()
    with over(objects) as one:
        one.put(1)
        objects.broken = True
        assert one.get(1) == []
        assert one.put(2) == (0, 0)
        assert one.store.delete(keys_of(1)) == 0
        assert one.store.lookup(keys_of(1)) == [True]
        one.store.check_integrity()
        assert one.store.counts().io_errors > 0
        objects.broken = False
        assert one.get(1) == [1]
        assert one.put(2) == (1, 1)
        one.store.check_integrity()


def test_a_store_that_does_not_answer_at_the_start_is_found_later() -> None:
    objects = BrokenObjects()
    with over(objects) as first:
        first.put(1)
    objects.broken = True
    with over(objects) as one:
        assert one.store.keys() == set()
        objects.broken = False
        one.clock.now += 1000
        assert one.put(2) == (1, 1)
        assert numbers_in(one.store.keys()) == {1, 2}


def test_a_blob_that_vanished_is_a_miss_and_can_be_put_again(
    machine: Callable[..., Machine], objects: MemoryObjects
) -> None:
    one = machine()
    one.put(1)
    objects.remove(page_name(key_of(1)))
    one.store.check_integrity()  # another machine may have removed it
    assert one.get(1) == []
    assert one.put(1) == (1, 1)


def test_a_page_of_a_key_that_is_not_in_the_ring_is_a_miss_and_is_kept_for_its_owner(
    machine: Callable[..., Machine], objects: MemoryObjects
) -> None:
    old, new = Ring(b"old"), Ring(b"new")
    owner = machine(codec=CodecConfig(keys=old))
    owner.put(1)
    stranger = machine(codec=CodecConfig(keys=new))
    assert stranger.get(1) == []
    assert stranger.store.counts().undecodable == 1
    assert stranger.store.counts().quarantined == 0
    assert owner.get(1) == [1]


# --- in a stack ------------------------------------------------------------------------------------------


def test_lookup_and_get_name_the_nearest_tier_and_reads_promote_nothing(tmp_path: Path) -> None:
    with open_stack(tmp_path, shared_bytes=2**20) as stack:
        for number, tier in enumerate(Tier):
            stack.put(pages_of(number), epoch=1, salt_id=SALT_ID, tier=tier)
        assert stack.lookup(keys_of(0, 1, 2, 3)) == [Tier.HOST, Tier.NVME, Tier.SHARED, None]
        found = stack.get(keys_of(0, 1, 2, 3))
        assert [one.tier if one else None for one in found] == [Tier.HOST, Tier.NVME, Tier.SHARED, None]
        assert [numbers_in(stack.keys(tier)) for tier in Tier] == [{0}, {1}, {2}]


def test_pages_move_from_every_nearer_tier_and_copies_stay(tmp_path: Path) -> None:
    with open_stack(tmp_path, shared_bytes=2**20) as stack:
        stack.put(pages_of(1, 2), epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
        stack.put(pages_of(3), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
        assert stack.copy(keys_of(1, 3), Tier.SHARED, epoch=1, salt_id=SALT_ID).status == "accepted"
        assert [numbers_in(stack.keys(tier)) for tier in Tier] == [{1, 2}, {3}, {1, 3}]
        assert stack.move(keys_of(1, 2, 3), Tier.SHARED, epoch=1, salt_id=SALT_ID).pages == 3
        assert [numbers_in(stack.keys(tier)) for tier in Tier] == [set(), set(), {1, 2, 3}]
        assert stack.move(keys_of(9), Tier.SHARED, epoch=1, salt_id=SALT_ID).status == "missing"
        stack.check_integrity()


def test_two_machines_meet_in_the_shared_directory(tmp_path: Path) -> None:
    def on(name: str) -> TierConfig:
        folder = tmp_path / name
        shared = SharedConfig(tmp_path / "shared", 2**20)
        return TierConfig(PAGE, FINGERPRINT, None, 0, folder, 2**20, shared=shared)

    with TierStack.open(on("a")) as one, TierStack.open(on("b")) as two:
        one.put(pages_of(1, 2), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
        one.move(keys_of(1, 2), Tier.SHARED, epoch=1, salt_id=SALT_ID)
        two.refresh()
        assert two.lookup(keys_of(1, 2)) == [Tier.SHARED, Tier.SHARED]
        assert [bytes(page.payload) for page in two.get(keys_of(1, 2)) if page] == [payload_of(1), payload_of(2)]
        shutil.rmtree(tmp_path / "shared")
        assert two.get(keys_of(1, 2)) == [None, None]
        assert two.put(pages_of(1), epoch=1, salt_id=SALT_ID, tier=Tier.SHARED).status == "accepted"
