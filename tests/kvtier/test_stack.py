from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvtier
from kvtier import Receipt, Tier, TierClosedError, TierStack, TierUsageError
from kvtier.fileops import Buffer
from tests.kvtier.support import (
    PAGE,
    SALT_ID,
    FaultyIo,
    NoSync,
    chain,
    flip_in_payload,
    key_of,
    keys_of,
    landed,
    numbers_in,
    open_stack,
    pages_of,
    payload_of,
    payloads,
    rooms_of,
    segments,
)


def test_pages_move_to_nvme_and_leave_the_host(tmp_path: Path) -> None:
    with open_stack(tmp_path) as stack:
        stack.put(pages_of(1, 2), epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
        assert stack.move_to_nvme(keys_of(1, 2), epoch=1, salt_id=SALT_ID) == Receipt("accepted", 2, 2 * PAGE)
        assert stack.keys(Tier.HOST) == set()
        assert [one.tier for one in stack.get(keys_of(1, 2)) if one] == [Tier.NVME, Tier.NVME]
        assert stack.move_to_nvme(keys_of(1, 2), epoch=1, salt_id=SALT_ID) == Receipt("accepted", 2, 0)
        assert stack.move_to_nvme(keys_of(7), epoch=1, salt_id=SALT_ID).status == "missing"
        part = stack.move_to_nvme(keys_of(1, 7), epoch=1, salt_id=SALT_ID)
        assert (part.status, part.pages) == ("clipped", 1)
        stack.check_integrity()


def test_what_nvme_cannot_take_stays_on_the_host(tmp_path: Path) -> None:
    io = FaultyIo()
    with open_stack(tmp_path, io) as stack:
        stack.put(pages_of(1), epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
        io.fail(OSError(errno.ENOSPC, "full"), lambda seen, path: seen == "write" and ".seg" in path.name)
        assert stack.move_to_nvme(keys_of(1), epoch=1, salt_id=SALT_ID).status == "rejected"
        io.heal()
        assert payloads(stack.get(keys_of(1))) == [payload_of(1)]
        assert stack.lookup(keys_of(1)) == [Tier.HOST]


def test_a_store_that_failed_half_way_leaves_no_visible_key(tmp_path: Path) -> None:
    io = FaultyIo()
    with open_stack(tmp_path, io, shared_bytes=2**20) as stack:
        io.fail(OSError(errno.EIO, "I/O error"), lambda seen, _: seen == "write")
        for tier in Tier:
            assert stack.put(pages_of(1), epoch=1, salt_id=SALT_ID, tier=tier).status == "rejected"
        io.heal()
        assert stack.lookup(keys_of(1)) == [None]
    with open_stack(tmp_path, shared_bytes=2**20) as again:
        assert again.lookup(keys_of(1)) == [None]


def test_a_bad_host_copy_is_served_from_nvme(tmp_path: Path) -> None:
    with open_stack(tmp_path) as stack:
        for tier in (Tier.HOST, Tier.NVME):
            stack.put(pages_of(1), epoch=1, salt_id=SALT_ID, tier=tier)
        flip_in_payload(tmp_path / "arena", 1)
        (loaded,) = stack.get(keys_of(1))
        assert loaded is not None
        assert (bytes(loaded.payload), loaded.tier) == (payload_of(1), Tier.NVME)


def test_deleting_takes_a_key_out_of_every_tier(tmp_path: Path) -> None:
    with open_stack(tmp_path, shared_bytes=2**20) as stack:
        for tier in Tier:
            stack.put(pages_of(1, 2), epoch=1, salt_id=SALT_ID, tier=tier)
        assert stack.delete(keys_of(1)) == Receipt("accepted", 1, 3 * PAGE)
        assert stack.lookup(keys_of(1, 2)) == [None, Tier.HOST]


def test_two_tenants_with_the_same_prompt_never_meet(tmp_path: Path) -> None:
    ours, theirs = chain(b"salt-a", range(8)), chain(b"salt-b", range(8))
    with open_stack(tmp_path, shared_bytes=2**20) as stack:
        for tier in Tier:
            stack.put([(key, payload_of(1)) for key in ours], epoch=1, salt_id=b"a", tier=tier)
        assert stack.lookup(theirs) == [None, None]
        assert stack.get(theirs) == [None, None]


def test_a_tier_that_is_off_rejects_and_finds_nothing(tmp_path: Path) -> None:
    with open_stack(tmp_path, host=0, nvme_bytes=0) as stack:
        for tier in Tier:
            assert stack.put(pages_of(1), epoch=1, salt_id=SALT_ID, tier=tier).status == "rejected"
        assert stack.move_to_nvme(keys_of(1), epoch=1, salt_id=SALT_ID).status == "rejected"
        assert stack.get(keys_of(1)) == [None]
        stack.check_integrity()


def test_wrong_use_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with open_stack(tmp_path) as stack:
        with pytest.raises(TierUsageError, match="1000 bytes here, this one has 3"):
            stack.put([(keys_of(1)[0], b"abc")], epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
        with pytest.raises(TierUsageError, match="32 bytes"):
            stack.put([(b"k", payload_of(1))], epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
        with pytest.raises(TierUsageError, match="salt_id has 33"):
            stack.put(pages_of(1), epoch=1, salt_id=bytes(33), tier=Tier.HOST)
        with pytest.raises(TierUsageError, match="epoch -1"):
            stack.put(pages_of(1), epoch=-1, salt_id=SALT_ID, tier=Tier.HOST)
    with pytest.raises(TierClosedError):
        stack.get(keys_of(1))
    stack.close()


def test_every_kind_of_buffer_is_stored_as_its_bytes(tmp_path: Path) -> None:
    with open_stack(tmp_path, shared_bytes=2**20) as stack:
        kinds: list[Buffer] = [
            payload_of(1),
            bytearray(payload_of(2)),
            memoryview(payload_of(3)),
            memoryview(payload_of(4)).cast("H"),
        ]
        pages = list(zip(keys_of(1, 2, 3, 4), kinds, strict=True))
        for tier in Tier:
            assert stack.put(pages, epoch=1, salt_id=SALT_ID, tier=tier).status == "accepted"
            for key in keys_of(1, 2, 3, 4):
                assert key in stack.keys(tier)
        assert payloads(stack.get(keys_of(1, 2, 3, 4))) == [payload_of(n) for n in (1, 2, 3, 4)]


def test_files_are_private(tmp_path: Path) -> None:
    with open_stack(tmp_path, shared_bytes=2**20) as stack:
        for tier in Tier:
            stack.put(pages_of(1), epoch=1, salt_id=SALT_ID, tier=tier)
        for path in (tmp_path / "arena", *segments(tmp_path), *(tmp_path / "shared").rglob("pages/*/*")):
            assert path.stat().st_mode & 0o077 == 0


def test_the_face_is_sorted_and_free_of_heavy_imports() -> None:
    assert kvtier.__all__ == sorted(kvtier.__all__)
    assert all(hasattr(kvtier, name) for name in kvtier.__all__)
    heavy = ("torch", "asyncpg", "fastapi", "temporalio", "boto3", "cryptography", "zstandard")
    program = f"import kvtier, sys; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)


def test_a_page_that_does_not_verify_is_read_from_the_tier_below(tmp_path: Path) -> None:
    with open_stack(tmp_path) as stack:
        for tier in (Tier.HOST, Tier.NVME):
            stack.put(pages_of(1, 2), epoch=1, salt_id=SALT_ID, tier=tier)
        flip_in_payload(tmp_path / "arena", 1)
        rooms = rooms_of(1, 2, 3)
        read = stack.read_into(rooms)
        assert landed(rooms, read.tiers) == [payload_of(1), payload_of(2), None]
        assert read.tiers == {key_of(1): Tier.NVME, key_of(2): Tier.HOST}


@pytest.mark.parametrize(
    "room", [memoryview(bytes(PAGE)), memoryview(bytearray(PAGE - 1)), memoryview(bytearray(2 * PAGE))[::2]]
)
def test_memory_that_no_page_can_be_read_into_is_refused_in_a_sentence(tmp_path: Path, room: memoryview) -> None:
    with open_stack(tmp_path) as stack, pytest.raises(TierUsageError, match=f"{PAGE} contiguous bytes"):
        stack.read_into([(key_of(1), room)])


class StackModel(RuleBasedStateMachine):
    """The stack against a dict of what was put and not deleted: it may forget a page, never change one."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.base = Path(self.folder.name)
        self.known: dict[int, bytes] = {}
        self.stack = self.open()

    def open(self) -> TierStack:
        return open_stack(self.base, NoSync(), host=4, nvme_bytes=40_000, shared_bytes=70_000)

    def everywhere(self) -> set[bytes]:
        return set().union(*(self.stack.keys(tier) for tier in Tier))

    @initialize()
    def start(self) -> None:
        self.known = {}

    @rule(numbers=NUMBERS, tier=st.sampled_from(Tier))
    def put(self, numbers: list[int], tier: Tier) -> None:
        receipt = self.stack.put(pages_of(*numbers), epoch=1, salt_id=SALT_ID, tier=tier)
        self.known |= {number: payload_of(number) for number in numbers}
        held = sum(key in self.stack.keys(tier) for key in keys_of(*numbers))
        assert receipt.pages == held
        assert (receipt.status == "accepted") == (held == len(numbers))

    @rule(numbers=NUMBERS, to=st.sampled_from([Tier.NVME, Tier.SHARED]))
    def move(self, numbers: list[int], to: Tier) -> None:
        before = self.stack.lookup(keys_of(*numbers))
        receipt = self.stack.move(keys_of(*numbers), to, epoch=1, salt_id=SALT_ID)
        assert receipt.pages <= len(numbers)
        if receipt.status == "accepted":
            assert None not in before
            assert set(keys_of(*numbers)) <= self.stack.keys(to)
            assert not set(keys_of(*numbers)) & self.stack.keys(Tier.HOST)

    @rule(numbers=NUMBERS, to=st.sampled_from([Tier.NVME, Tier.SHARED]))
    def copy(self, numbers: list[int], to: Tier) -> None:
        before = self.stack.keys(Tier.HOST)
        self.stack.copy(keys_of(*numbers), to, epoch=1, salt_id=SALT_ID)
        assert self.stack.keys(Tier.HOST) == before

    @rule()
    def collect(self) -> None:
        before = self.everywhere()
        self.stack.collect()
        assert self.everywhere() == before

    @rule(numbers=NUMBERS)
    def get(self, numbers: list[int]) -> None:
        places = self.stack.lookup(keys_of(*numbers))
        for number, place, loaded in zip(numbers, places, self.stack.get(keys_of(*numbers)), strict=True):
            assert (loaded is None) == (place is None)
            if loaded is not None:
                assert bytes(loaded.payload) == self.known[number]
                assert loaded.tier == place

    @rule(numbers=NUMBERS)
    def read_into(self, numbers: list[int]) -> None:
        places = self.stack.lookup(keys_of(*numbers))
        rooms = rooms_of(*numbers)
        read = self.stack.read_into(rooms)
        assert [read.tiers.get(key) for key, _ in rooms] == places
        for number, page in zip(numbers, landed(rooms, read.tiers), strict=True):
            assert page in (None, self.known.get(number))

    @rule(numbers=NUMBERS)
    def delete(self, numbers: list[int]) -> None:
        others = self.everywhere() - set(keys_of(*numbers))
        there = sum(place is not None for place in self.stack.lookup(keys_of(*numbers)))
        assert self.stack.delete(keys_of(*numbers)).pages == there
        for number in numbers:
            self.known.pop(number, None)
        assert self.stack.lookup(keys_of(*numbers)) == [None] * len(numbers)
        assert self.everywhere() == others

    @rule(number=st.integers(0, 11))
    def damage(self, number: int) -> None:
        files = [self.base / "arena", *segments(self.base), *(self.base / "shared").rglob("pages/*/*")]
        for path in files:
            if payload_of(number) in path.read_bytes():
                flip_in_payload(path, number)
        self.stack.get(keys_of(number))

    @rule()
    def restart(self) -> None:
        before = [self.stack.keys(tier) for tier in Tier]
        self.stack.close()
        self.stack = self.open()
        assert [self.stack.keys(tier) for tier in Tier] == before

    @invariant()
    def nothing_unknown_and_all_accounts_agree(self) -> None:
        held = numbers_in(self.everywhere(), 12)
        assert held <= self.known.keys()
        self.stack.check_integrity()
        shared = (self.base / "shared" / "pages").rglob("*")
        lies = sum(path.stat().st_size for path in shared if path.is_file())
        assert lies == self.stack.stats().shared.used_bytes <= 70_000

    def teardown(self) -> None:
        self.stack.close()
        self.folder.cleanup()


TestStackModel = StackModel.TestCase
TestStackModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
