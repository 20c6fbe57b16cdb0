"""Every operation fails, tears, lies or stalls once, at every place: no wrong bytes, no leak, the tiers live on."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier import CodecConfig, Compression, Tier, TierClosedError, TierConfig, TierConfigError, TierStack
from kvtier.faults import Fault, FaultyIo
from tests.kvtier.media import Ring
from tests.kvtier.support import SALT_ID, NoSync, config, keys_of, landed, pages_of, payload_of, payloads, rooms_of

FAULTS = 1000
SHARED_BYTES = 90_000
NVME_BYTES = 60_000


def settings(base: Path, codec: CodecConfig | None = None) -> TierConfig:
    return replace(
        config(base, host=6, nvme_bytes=NVME_BYTES, shared_bytes=SHARED_BYTES, codec=codec), read_deadline_s=5.0
    )


@contextmanager
def helper_that_ends_stalls(io: FaultyIo, stack: Callable[[], TierStack | None]) -> Iterator[None]:
    """While one operation stalls, the tiers answer what needs no I/O; then it goes on."""
    done, refused = threading.Event(), []

    def watch() -> None:
        while not done.is_set():
            if not io.stalled.wait(0.02):
                continue
            try:
                opened = stack()
                if opened is not None:
                    with suppress(TierClosedError):
                        opened.lookup(keys_of(*range(12)))
            except Exception as error:  # a thread's error must reach the test
                refused.append(error)
            io.stalled.clear()
            io.released.set()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        io.disarm()
        thread.join()
    assert not refused


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Workload:
    """Random work on a stack, and what must hold after each piece of it, whatever went wrong."""

    def __init__(self, base: Path, io: FaultyIo, noise: random.Random, codec: CodecConfig | None = None) -> None:
        self.settings, self.base, self.io, self.noise = settings(base, codec), base, io, noise
        self.stack: TierStack | None = TierStack.open(self.settings, io=io)
        self.held = 0  # how often the shared store was tidied up

    @property
    def tiers(self) -> TierStack:
        assert self.stack is not None
        return self.stack

    def step(self) -> None:
        numbers = self.noise.sample(range(12), self.noise.randint(1, 5))
        keys, tier = keys_of(*numbers), self.noise.choice(list(Tier))
        work = self.noise.choice(["put", "put", "get", "read into", "move", "copy", "delete", "collect", "restart"])
        if work == "put":
            self.tiers.put(pages_of(*numbers), epoch=1, salt_id=SALT_ID, tier=tier)
        elif work == "get":
            self.check_bytes(numbers)
        elif work == "read into":
            self.check_landed(numbers)
        elif work == "move":
            self.tiers.move(keys, tier, epoch=1, salt_id=SALT_ID)
        elif work == "copy":
            self.tiers.copy(keys, tier, epoch=1, salt_id=SALT_ID)
        elif work == "delete":
            if self.tiers.delete(keys).status == "accepted":
                assert self.tiers.lookup(keys) == [None] * len(keys)
        elif work == "collect":
            self.tiers.collect()
        else:
            self.restart()

    def restart(self) -> None:
        """Under a fault this may be refused, in a sentence; without one it may not."""
        self.tiers.close()
        self.stack = None
        try:
            self.stack = TierStack.open(self.settings, io=self.io)
        except TierConfigError:
            assert self.io.hit is not None
            self.stack = TierStack.open(self.settings, io=self.io)

    def check_bytes(self, numbers: list[int]) -> None:
        for number, page in zip(numbers, payloads(self.tiers.get(keys_of(*numbers))), strict=True):
            assert page in (None, payload_of(number)), f"wrong bytes of page {number} after {self.io.hit}"

    def check_landed(self, numbers: list[int]) -> None:
        rooms = rooms_of(*numbers)
        for number, page in zip(numbers, landed(rooms, self.tiers.read_into(rooms).tiers), strict=True):
            assert page in (None, payload_of(number)), f"wrong bytes of page {number} after {self.io.hit}"

    def check_all(self, lied: bool) -> None:
        """Right bytes, no leak, within the budget, alive. A medium that lied is believed only after a restart."""
        self.check_bytes(list(range(12)))
        if lied:
            self.restart()
            self.check_bytes(list(range(12)))
        collected = self.tiers.collect()  # of a shared store: what was marked, and what a failed write left
        self.tiers.refresh()
        self.tiers.put(pages_of(0), epoch=1, salt_id=SALT_ID, tier=Tier.NVME)
        self.tiers.check_integrity()
        stats = self.tiers.stats()
        assert size_of(self.base / "nvme") == stats.nvme.used_bytes <= NVME_BYTES, self.io.hit
        assert size_of(self.base / "shared" / "pages") == stats.shared.used_bytes <= SHARED_BYTES, self.io.hit
        # A start whose predecessor could not give its lease back waits for it before it removes anything.
        assert not collected.held or not list((self.base / "shared" / "incoming").iterdir()), self.io.hit
        self.held += collected.held
        assert (self.base / "arena").stat().st_size <= stats.host.budget_bytes

    def check_alive(self) -> None:
        for tier in Tier:
            self.tiers.delete(keys_of(30))
            self.tiers.put(pages_of(30), epoch=1, salt_id=SALT_ID, tier=tier)
            assert payloads(self.tiers.get(keys_of(30))) == [payload_of(30)], f"{tier} is dead after {self.io.hit}"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "codec", [CodecConfig(), CodecConfig(Compression.ZLIB, keys=Ring(b"key-1"))], ids=["plain", "coded"]
)
def test_a_thousand_faults_cost_pages_and_nothing_else(tmp_path: Path, seed: int, codec: CodecConfig) -> None:
    noise, io = random.Random(seed), FaultyIo(NoSync())
    work = Workload(tmp_path, io, noise, codec)
    hits: dict[str, int] = {}
    with helper_that_ends_stalls(io, lambda: work.stack):
        while sum(hits.values()) < FAULTS // 4:
            fault = noise.choice(list(Fault))
            io.arm(noise.randrange(40), fault)
            for _ in range(4):
                work.step()
            io.disarm()
            if io.hit is None:
                continue
            hits[fault.value] = hits.get(fault.value, 0) + 1
            work.check_all(fault is Fault.LIE)
        work.check_alive()
        work.tiers.close()
    assert set(hits) == {fault.value for fault in Fault}
    assert work.held  # and the shared store was tidied up in between


def script(base: Path, io: FaultyIo) -> None:
    """A short life: a stack is opened, filled, moved about, read, emptied and opened again."""
    one = replace(settings(base), io_threads=1, read_threads=1)
    with TierStack.open(one, io=io) as stack:
        stack.put(pages_of(1, 2, 3), epoch=1, salt_id=SALT_ID, tier=Tier.HOST)
        stack.move(keys_of(1, 2, 3), Tier.NVME, epoch=1, salt_id=SALT_ID)
        stack.copy(keys_of(2), Tier.SHARED, epoch=1, salt_id=SALT_ID)
        assert all(
            page in (None, payload_of(n)) for n, page in zip((1, 2), payloads(stack.get(keys_of(1, 2))), strict=True)
        )
        stack.delete(keys_of(1, 3))


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.TEAR, Fault.LIE])
def test_at_every_place_of_a_short_life_the_next_start_finds_order(tmp_path: Path, fault: Fault) -> None:
    calm = FaultyIo(NoSync())
    script(tmp_path / "calm", calm)
    for place in range(calm.operations):
        base, io = tmp_path / str(place), FaultyIo(NoSync())
        base.mkdir()
        io.arm(place, fault)
        with suppress(TierConfigError):  # a sentence is all that a start on such a medium owes
            script(base, io)
        io.disarm()
        with TierStack.open(settings(base), io=io) as stack:
            for number, page in zip((1, 2, 3), payloads(stack.get(keys_of(1, 2, 3))), strict=True):
                assert page in (None, payload_of(number)), f"wrong bytes after {io.hit}"
            stack.collect()
            stack.refresh()
            assert stack.put(pages_of(1, 2, 3), epoch=1, salt_id=SALT_ID, tier=Tier.NVME).status == "accepted", io.hit
            assert payloads(stack.get(keys_of(1, 2, 3))) == [payload_of(number) for number in (1, 2, 3)]
            stack.check_integrity()
            assert size_of(base / "nvme") == stack.stats().nvme.used_bytes, io.hit
    assert calm.operations > 50
