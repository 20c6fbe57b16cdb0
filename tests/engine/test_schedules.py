"""Random schedules against a sequential oracle: whoever comes, goes, forks, moves or is sent back, no bit changes.

`pytest --hypothesis-profile=soak` tries two thousand on each backend.
"""

from __future__ import annotations

import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.backends.face import Backend
from engine.errors import RequestError
from engine.scheduler import Budget
from kvtier import TierConfig, TierStack
from tests.engine.conftest import Loaded, cpu_backend
from tests.engine.fakes import PAGE_BYTES, VOCAB, FakeBackend
from tests.engine.stepped import LogitsLog, ManualLanes, Stepped, StreamLanes, Told

BLOCKS = 12
CONTEXT = 512
TIGHT = Budget(prefill_beside_decode=7, prefill_alone=21, running=4)
WIDE = Budget(prefill_beside_decode=256, prefill_alone=256)

OPS = (
    *("turn", "turn", "turn", "turn", "arrive", "arrive", "return", "fork", "twin", "cancel"),
    *("resume", "resume", "host", "nvme", "prefetch", "pin", "release", "drop"),
    *("land_write", "land_write", "land_read", "land_read", "lose_read", "late"),
)
Schedule = list[tuple[str, int, int]]
schedules = st.lists(
    st.tuples(st.sampled_from(OPS), st.integers(0, 2**16), st.integers(0, 2**16)), min_size=20, max_size=100
)


@dataclass
class Rig:
    """A kind of engine to be driven: how a backend for a pool of so many blocks is made."""

    name: str
    backend: Callable[[int], Backend]
    page_bytes: int
    vocab: int
    lanes: type[ManualLanes] = ManualLanes

    def engine(self, blocks: int, stack: TierStack | None, budget: Budget) -> Stepped:
        return Stepped(
            self.backend(blocks),
            blocks,
            stack,
            page_bytes=self.page_bytes,
            vocab=self.vocab,
            context=CONTEXT,
            budget=budget,
            lanes=self.lanes(),
            tick_s=0.01,
        )


@pytest.fixture(params=["fake", "cpu", "ahead"])
def rig(request: pytest.FixtureRequest, tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """`ahead`: steps run ahead of pages whenever they may."""
    if request.param == "fake":
        return Rig("fake", FakeBackend, PAGE_BYTES, VOCAB)
    weights, ahead = tiny.weights("bf16", None), request.param == "ahead"
    size, vocab = tiny.facts.page_bytes("bf16"), tiny.facts.vocab
    for name, value in (("LEAST_PAGES", 1), ("LEAST_TOKENS", 1)):
        monkeypatch.setattr(f"engine.ahead.{name}", value)

    def backend(blocks: int) -> Backend:
        made: Backend = cpu_backend(tiny.facts, weights, blocks)
        made.overlaps = ahead
        return made

    return Rig(request.param, backend, size, vocab, StreamLanes) if ahead else Rig("cpu", backend, size, vocab)


class Player:
    """Turns a schedule's numbers into calls."""

    def __init__(self, engine: Stepped, vocab: int) -> None:
        self.engine = engine
        self.vocab = vocab
        self.oracle: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def play(self, schedule: Schedule) -> None:
        for op, a, b in schedule:
            getattr(self, f"_{op}")(a, b)

    def prompt(self, a: int, b: int) -> list[int]:
        length, step = 1 + a % 50, 1 + b % 3
        return [(step * i * i + 7 * i + b % 2) % (self.vocab - 4) + 3 for i in range(length)]

    def _arrive(self, a: int, b: int) -> None:
        self._submit(a % 4, self.prompt(a, b), b)

    def _return(self, a: int, b: int) -> None:
        """The session's transcript so far, and a message."""
        own = [t for t in self.engine.told if t.session == f"s{a % 4}" and t.reason is not None]
        if own:
            transcript = [*own[-1].prompt, *own[-1].tokens]
            self._submit(a % 4, [*transcript, *self.prompt(b % 20, a)], b, known=len(transcript))

    def _resume(self, a: int, b: int) -> None:
        """As after a long pause: nothing else runs, and a session's pages come from NVMe."""
        self.engine.settle()
        self._nvme(a, b)
        self.engine.settle()
        self._return(a, b)
        self._turn(b, a)

    def _fork(self, a: int, b: int) -> None:
        """Another session goes on from any point of a transcript, while that may still be growing."""
        if self.engine.told:
            from_ = self.engine.told[a % len(self.engine.told)]
            transcript = [*from_.prompt, *from_.tokens]
            self._submit(b % 4, [*transcript[: 1 + b % len(transcript)], *self.prompt(a % 5, b)], a)

    def _twin(self, a: int, b: int) -> None:
        """The same prompt again, with other noise."""
        if self.engine.told:
            self._submit(b % 4, list(self.engine.told[a % len(self.engine.told)].prompt), a, salt=b)

    def _submit(self, session: int, prompt: list[int], count: int, known: int = 0, salt: int = 0) -> None:
        prompt = prompt[:100]
        seed = zlib.crc32(repr((prompt, salt)).encode())
        self.engine.submit(
            f"s{session}", prompt, 1 + count % 70, seed, known=min(known, len(prompt)), salt=bytes([session % 2])
        )

    def _cancel(self, a: int, _: int) -> None:
        if self.engine.told:
            self.engine.core.cancel(self.engine.told[a % len(self.engine.told)].request_id)

    def _turn(self, a: int, _: int) -> None:
        for _step in range(1 + a % 5):
            self.engine.turn()

    def _kv(self, intent: str, a: int, **fields: Any) -> None:
        self.engine.kv(intent, f"s{a % 4}", salt=bytes([a % 4 % 2]).hex(), **fields)

    def _host(self, a: int, b: int) -> None:
        self._kv("offload", a, tier="host", evict=bool(b % 2))

    def _nvme(self, a: int, _: int) -> None:
        self._kv("offload", a, tier="nvme")

    def _prefetch(self, a: int, _: int) -> None:
        self._kv("prefetch", a)

    def _pin(self, a: int, _: int) -> None:
        self._kv("pin", a)

    def _release(self, a: int, _: int) -> None:
        self._kv("release", a)

    def _drop(self, a: int, _: int) -> None:
        self._kv("drop", a)

    def _land_write(self, *_: int) -> None:
        if self.engine.lanes.writes:
            self.engine.lanes.land_write()

    def _land_read(self, a: int, _: int) -> None:
        if self.engine.lanes.reads:
            self.engine.lanes.land_read(a)

    def _lose_read(self, a: int, _: int) -> None:
        if self.engine.lanes.reads:
            self.engine.lanes.land_read(a, lost=True)

    def _late(self, *_: int) -> None:
        self.engine.now_s += 20.0


def alone(rig: Rig, told: Told) -> list[int]:
    """The sequential oracle: this request, nobody else, the prompt in one piece, nothing reused."""
    engine = rig.engine(64, None, WIDE)
    again = engine.submit("alone", told.prompt, told.count, told.sampling.seed)
    engine.settle()
    return again.tokens


def check(rig: Rig, schedule: Schedule, root: Path) -> Stepped:
    room = 4096
    config = TierConfig(
        page_bytes=rig.page_bytes,
        fingerprint=b"f" * 32,
        host_path=root / "arena",
        host_bytes=10 * (rig.page_bytes + room),
        nvme_dir=root / "nvme",
        nvme_bytes=40 * (rig.page_bytes + room),
    )
    with pytest.MonkeyPatch.context() as patch:
        LogitsLog(patch)
        stack = TierStack.open(config)
        try:
            engine = rig.engine(BLOCKS, stack, TIGHT)
            player = Player(engine, rig.vocab)
            player.play(schedule)
            engine.settle()
            for told in engine.told:
                expected = alone(rig, told)
                if told.reason == "cancelled":
                    assert told.tokens == expected[: len(told.tokens)]
                else:
                    assert (told.reason, told.tokens) == ("length", expected)
            assert_nothing_is_left(engine)
        finally:
            stack.close()
    return engine


def assert_nothing_is_left(engine: Stepped) -> None:
    for number in range(4):
        engine.kv("drop", f"s{number}", salt=bytes([number % 2]).hex())
    engine.settle()
    counts = engine.store.pool.counts()
    assert counts.free == counts.total
    assert engine.stack is not None
    engine.stack.check_integrity()
    stats = engine.stack.stats()
    assert stats.host.pages == stats.nvme.pages == 0


@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(schedule=schedules)
def test_no_schedule_changes_a_bit_or_leaks_a_page(rig: Rig, schedule: Schedule) -> None:
    root = Path(tempfile.mkdtemp(prefix="tenuto-schedule-"))
    try:
        check(rig, schedule, root)
    finally:
        shutil.rmtree(root)


def test_an_oracle_that_is_lied_to_is_noticed(rig: Rig) -> None:
    """The comparison can fail: one flipped bit in a page changes the logits, and the log tells."""
    with pytest.MonkeyPatch.context() as patch:
        LogitsLog(patch)
        engine = rig.engine(BLOCKS, None, TIGHT)
        told = engine.submit("s", list(range(3, 40)), 8, 1)
        while not told.tokens:
            engine.turn()
        page = engine.store.backend.page(engine.core.scheduler.requests()[0].blocks[0])
        page[: rig.page_bytes] = bytes(rig.page_bytes)
        engine.settle()
        with pytest.raises(AssertionError, match="differ"):
            alone(rig, told)


def test_a_request_that_fits_no_pool_is_refused_before_anything_is_held(rig: Rig) -> None:
    engine = rig.engine(BLOCKS, None, TIGHT)
    with pytest.raises(RequestError, match="kv-tokens"):
        engine.submit("s", [5] * (BLOCKS * 16), 4, 1)
    engine.core.check_integrity()
