"""Storage that fails under an engine: answers stay right, faults are counted, nothing leaks, no budget is passed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import RealIo, SharedConfig, Tier, TierConfig
from kvtier.faults import Fault, FaultyIo
from runtime.engine_view import FAULTS as SHOWN
from tests.engine.fakes import FINGERPRINT, PAGE_BYTES, oracle
from tests.engine.test_core import PROMPT, turn
from tests.engine.tiered import Tiered

FAULTS = 1000
HOST_BYTES, NVME_BYTES, SHARED_BYTES = 1 << 14, 1 << 19, 1 << 19
PLACES = ("host", "nvme", "shared")


class NoSync(RealIo):
    """Power does not fail here, and a thousand faults have many files."""

    def fsync(self, fd: int) -> None:
        pass


def settings(root: Path, **changes: Any) -> TierConfig:
    return TierConfig(
        PAGE_BYTES,
        FINGERPRINT,
        root / "arena",
        HOST_BYTES,
        root / "nvme",
        NVME_BYTES,
        shared=SharedConfig(root / "shared", SHARED_BYTES, grace_s=0.0),
        **changes,
    )


@contextlib.contextmanager
def stalls_end(io: FaultyIo) -> Iterator[None]:
    """Whatever is stalled goes on, as soon as it is."""
    over = threading.Event()

    def release() -> None:
        while not over.is_set():
            if io.stalled.wait(0.01):
                io.released.set()
                over.wait(0.001)  # a loop that only spins would hold up those whom it released

    helper = threading.Thread(target=release)
    helper.start()
    try:
        yield
    finally:
        over.set()
        io.released.set()
        helper.join()


class Agents:
    """Sessions that think, wait with their pages in some tier, and come back; the oracle knows every token."""

    def __init__(self, engine: Tiered, noise: random.Random) -> None:
        self.engine, self.noise = engine, noise
        self.transcripts: dict[str, list[int]] = {}

    def step(self, number: int) -> None:
        name = f"s{number % 5}"
        work = self.noise.choice(["think", "think", "offload", "offload", "prefetch", "drop"])
        if work == "think":
            self.think(name)
        elif name not in self.transcripts:
            return
        elif work == "drop":
            self.engine.kv("drop", name)
            del self.transcripts[name]
        elif work == "prefetch":
            self.engine.kv("prefetch", name)
        else:
            self.engine.kv("offload", name, tier=self.noise.choice(PLACES), evict=True)

    def think(self, name: str) -> None:
        before = self.transcripts.get(name, [])
        fresh = [self.noise.randrange(60) for _ in range(self.noise.randrange(1, 40))]
        if len(before) > 150:
            self.engine.kv("drop", name)
            before = []
        prompt = [*before, *fresh]
        done = self.engine.generate(name, prompt, 3, known_tokens=max(0, len(before) - 1))
        assert done.tokens == oracle(prompt, 3), "a wrong token"
        self.transcripts[name] = [*prompt, *done.tokens]

    def end(self) -> None:
        for name in list(self.transcripts):
            self.engine.kv("drop", name)
            del self.transcripts[name]


def test_a_thousand_faults_change_no_token_and_leave_nothing(tmp_path: Path) -> None:
    noise, io = random.Random(7), FaultyIo(NoSync())
    hits: dict[str, int] = {}
    with Tiered(settings(tmp_path), io=io) as engine, stalls_end(io):
        agents = Agents(engine, noise)
        number = 0
        while sum(hits.values()) < FAULTS:
            fault = noise.choice(list(Fault))
            io.arm(noise.randrange(12), fault)
            for _ in range(3):
                number += 1
                agents.step(number)
            io.disarm()
            if io.hit is not None:
                hits[fault.value] = hits.get(fault.value, 0) + 1
            if number % 60 == 0:
                check(engine, tmp_path)
        agents.end()
        check(engine, tmp_path)
        assert engine.stack is not None
        left = {place: len(engine.stack.keys(place)) for place in Tier}
        assert left == dict.fromkeys(left, 0)
        assert engine.state("s0")["device_pages"] == 0
        engine.lanes.close()
    assert set(hits) == {fault.value for fault in Fault}


def check(engine: Tiered, root: Path) -> None:
    """Books that add up, and no byte over a budget. A medium that lied is found out by an audit."""
    assert engine.stack is not None
    engine.stack.audit(repair=True)
    stats = engine.stats()
    assert stats["integrity"] == "ok", stats["integrity"]
    for folder, budget in (("nvme", NVME_BYTES), ("shared/pages", SHARED_BYTES)):
        used = sum(path.stat().st_size for path in (root / folder).rglob("*") if path.is_file())
        assert used <= budget, f"{folder} is over its budget"
    assert (root / "arena").stat().st_size <= HOST_BYTES


# --- faults by name --------------------------------------------------------------------------------------------------


def segments(root: Path) -> list[Path]:
    return sorted(path for path in (root / "nvme").rglob("*.seg"))


def flipped(root: Path) -> None:
    for path in segments(root):
        data = bytearray(path.read_bytes())
        data[-PAGE_BYTES // 2] ^= 1
        path.write_bytes(data)


def truncated(root: Path) -> None:
    for path in segments(root):
        os.truncate(path, path.stat().st_size // 2)


def vanished(root: Path) -> None:
    shutil.rmtree(root / "nvme")


def foreign(root: Path) -> None:
    """The bytes of other pages under the names of these."""
    paths = segments(root)
    first = paths[0].read_bytes()
    for path in paths:
        path.write_bytes(first[::-1])


@pytest.mark.parametrize(
    ("damage", "counted"),
    [(flipped, "quarantined"), (truncated, "quarantined"), (foreign, "quarantined"), (vanished, "recreated")],
)
def test_damage_on_disk_costs_a_recompute_and_is_counted(
    tmp_path: Path, damage: Callable[[Path], None], counted: str
) -> None:
    with Tiered(settings(tmp_path)) as engine:
        transcript = turn(engine, "s", PROMPT, 20)
        assert engine.kv("offload", "s", tier="nvme", evict=True)["status"] == "accepted"
        damage(tmp_path)
        prompt = [*transcript, 5]
        done = engine.generate("s", prompt, 5, known_tokens=len(transcript) - 1)
        assert done.tokens == oracle(prompt, 5)
        assert done.prefill["recomputed"] > 0
        engine.kv("offload", "s", tier="nvme", evict=True)  # and it is written anew
        stats = engine.stats()
        assert stats["tiers"]["nvme"][counted] > 0
        assert counted in SHOWN
        assert stats["integrity"] == "ok"
        again = engine.generate("s", [*prompt, *done.tokens, 6], 5, known_tokens=len(prompt) + 4)
        assert again.tokens == oracle([*prompt, *done.tokens, 6], 5)
        assert again.prefill["recomputed"] == 0


class Full(NoSync):
    """A disk without room, from some moment on."""

    broken: int | None = None

    def write_at(self, fd: int, buffers: list[Any], offset: int) -> None:
        if self.broken is not None:
            raise OSError(self.broken, os.strerror(self.broken))
        super().write_at(fd, buffers, offset)

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if self.broken is not None and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(self.broken, os.strerror(self.broken))
        return super().open(path, flags, mode)


@pytest.mark.parametrize("error", [28, 30], ids=["full", "read-only"])
def test_a_disk_that_takes_nothing_costs_copies_and_no_answer(tmp_path: Path, error: int) -> None:
    io = Full()
    with Tiered(settings(tmp_path), io=io) as engine:
        transcript = turn(engine, "s", PROMPT, 20)
        io.broken = error
        receipt = engine.kv("offload", "s", tier="nvme")
        assert receipt["status"] in ("rejected", "clipped", "missing")
        prompt = [*transcript, 5]
        done = engine.generate("s", prompt, 5, known_tokens=len(transcript) - 1)
        assert done.tokens == oracle(prompt, 5)
        assert engine.stats()["tiers"]["nvme"]["io_errors"] > 0
        io.broken = None
        assert engine.kv("offload", "s", tier="nvme")["status"] == "accepted"
        assert engine.stats()["integrity"] == "ok"


def test_two_engines_on_one_directory_serve_each_other_nothing_wrong(tmp_path: Path) -> None:
    first, second = (
        TierConfig(PAGE_BYTES, FINGERPRINT, tmp_path / name, HOST_BYTES, tmp_path / "nvme", NVME_BYTES)
        for name in ("arena-1", "arena-2")
    )
    noise = random.Random(3)
    with Tiered(first) as one, Tiered(second) as two:
        sides = [Agents(one, noise), Agents(two, noise)]
        for number in range(120):
            sides[number % 2].step(number)
        for side in sides:
            side.end()
        assert one.stats()["integrity"] == two.stats()["integrity"] == "ok"
        used = sum(path.stat().st_size for path in (tmp_path / "nvme").rglob("*") if path.is_file())
        assert used <= NVME_BYTES


def test_a_clock_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    """Files from the future and from 1970: neither order nor life of a page depends on them."""
    with Tiered(settings(tmp_path)) as engine:
        transcript = turn(engine, "s", PROMPT, 20)
        engine.kv("offload", "s", tier="nvme", evict=True)
    for number, path in enumerate(sorted((tmp_path / "nvme").rglob("*"))):
        when = 0 if number % 2 else 1 << 33
        os.utime(path, (when, when))
    with Tiered(settings(tmp_path)) as engine:
        done = engine.generate("s", [*transcript, 5], 5, known_tokens=len(transcript) - 1)
        assert done.tokens == oracle([*transcript, 5], 5)
        assert (done.prefill["nvme"] > 0, done.prefill["recomputed"]) == (True, 0)


def test_a_disk_that_never_answers_is_a_miss_after_its_deadline(tmp_path: Path) -> None:
    io = FaultyIo(NoSync())
    with Tiered(settings(tmp_path, read_deadline_s=0.05), io=io) as engine:
        transcript = turn(engine, "s", PROMPT, 20)
        engine.kv("offload", "s", tier="nvme", evict=True)
        io.arm(1, Fault.STALL)
        prompt = [*transcript, 5]
        done = engine.generate("s", prompt, 5, known_tokens=len(transcript) - 1)
        assert done.tokens == oracle(prompt, 5)
        assert done.prefill["recomputed"] > 0
        io.disarm()
        assert engine.stats()["tiers"]["nvme"]["timeouts"] > 0
