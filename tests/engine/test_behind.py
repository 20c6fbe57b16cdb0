"""Pages of running requests that are copied while they decode, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.backends.face import Logits, Tile
from engine.backends.moves import Arrival, Copied
from engine.scheduler import Budget
from kvtier import TierConfig, TierStack
from tests.engine.fakes import PAGE_BYTES, VOCAB, FakeBackend
from tests.engine.stepped import Stepped

PROMPT = [(5 * at + 3) % 50 + 3 for at in range(40)]
BLOCKS = 24
STEP_S, COPY_S = 0.1, 0.004


class Timed(FakeBackend):
    """Every step takes STEP_S and every page that is gathered COPY_S, by the engine's clock."""

    def __init__(self) -> None:
        super().__init__(BLOCKS)
        self.pass_s: Callable[[float], None] = lambda _: None
        self.gathered = 0

    def forward(self, tiles: Sequence[Tile], arrival: Arrival | None = None) -> list[Logits | None]:
        self.pass_s(STEP_S)
        return super().forward(tiles, arrival)

    def gather(self, pages: Sequence[tuple[int, int]]) -> Copied:
        self.pass_s(COPY_S * len(pages))
        self.gathered += len(pages)
        return super().gather(pages)


class Rig:
    """An engine over a host tier of so many pages; every transfer lands at once."""

    def __init__(self, base: Path, host_pages: int = 64, blocks: int = BLOCKS) -> None:
        room = PAGE_BYTES + 512
        path = base / "arena" if host_pages else None
        self.stack = TierStack.open(
            TierConfig(PAGE_BYTES, b"f" * 32, path, 4096 + host_pages * room, base / "nvme", 64 * (room + 8192))
        )
        self.backend = Timed()
        self.engine = Stepped(
            self.backend, blocks, self.stack, page_bytes=PAGE_BYTES, vocab=VOCAB, context=512, budget=Budget()
        )
        self.backend.pass_s = self._pass
        copies: Any = self.engine.store.copies
        copies._clock = lambda: self.engine.now_s

    def _pass(self, seconds: float) -> None:
        self.engine.now_s += seconds

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.turn()
            while self.engine.lanes.writes:
                self.engine.lanes.land_write()

    def dirty(self) -> int:
        pool = self.engine.store.pool
        keys = [key for request in self.engine.core.scheduler.requests() for key in request.keys]
        return sum(not pool.is_clean(key) for key in keys)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.stack.close()


def test_a_tool_that_starts_finds_the_pages_clean_that_became_whole_while_decoding(rig: Rig) -> None:
    told = rig.engine.submit("s", PROMPT, 100, 1)
    rig.turn(80)
    assert rig.dirty() == 0
    before = rig.backend.gathered
    assert rig.engine.store.counters.written_behind == before == (len(PROMPT) + 79) // 16
    rig.engine.core.cancel(told.request_id)
    receipt = rig.engine.kv("offload", "s", tier="host")
    rig.engine.settle()
    assert receipt[0]["status"] == "accepted"
    assert rig.backend.gathered == before + 1  # the partial last page


def test_what_was_copied_is_what_the_page_holds(rig: Rig) -> None:
    rig.engine.submit("s", PROMPT, 60, 1)
    rig.turn(40)
    (request,) = rig.engine.core.scheduler.requests()
    for block, key in zip(request.blocks, request.keys, strict=False):
        (loaded,) = rig.stack.get([key])
        assert loaded is not None
        assert bytes(loaded.payload) == bytes(rig.backend.page(block))


def test_copies_take_no_more_than_their_share_of_the_time_of_steps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.test_behind.COPY_S", 5 * STEP_S * 0.02)
    rig.engine.submit("s", list(range(3, 55)) * 4, 64, 1)
    rig.turn()
    before = rig.backend.gathered
    steps = 60
    rig.turn(steps)
    assert rig.dirty() > 0  # there would have been more to do
    assert 10 <= rig.backend.gathered - before <= steps / 5 + 1


def test_nothing_is_copied_while_prefill_is_under_way(rig: Rig) -> None:
    rig.engine.submit("s", PROMPT, 60, 1)
    rig.turn(1)
    rig.engine.submit("o", [7] * 200, 1, 2)
    while len(rig.engine.core.scheduler.requests()) == 2:
        before = rig.backend.gathered
        rig.turn()
        assert rig.backend.gathered == before
    rig.turn(3)
    assert rig.backend.gathered > 0


def test_copies_that_somebody_waits_for_go_first(rig: Rig) -> None:
    rig.engine.submit("paused", PROMPT, 2, 1)
    rig.turn(3)
    rig.engine.submit("s", [9] * 40, 60, 2)
    rig.turn(1)
    before = rig.engine.store.counters.written_behind
    rig.engine.kv("offload", "paused", tier="host")
    rig.engine.lanes.land_write()  # the look-up: now copies wait
    for _ in range(20):
        rig.engine.turn()  # and none of them lands
    assert rig.engine.store.counters.written_behind == before
    rig.turn(20)
    assert rig.engine.store.counters.written_behind > before


def test_no_page_of_another_session_goes_for_one_that_is_still_in_use(tmp_path: Path) -> None:
    rig = Rig(tmp_path, host_pages=3)
    rig.engine.submit("paused", PROMPT, 2, 1)
    rig.turn(3)
    rig.engine.kv("offload", "paused", tier="host")
    rig.turn(3)
    assert rig.stack.host_room() == 0
    rig.engine.submit("s", [9] * 40, 60, 2)
    rig.turn(40)
    assert rig.engine.store.counters.written_behind == 0
    assert rig.stack.stats().host.evicted == 0
    rig.stack.close()


def test_without_a_host_tier_nothing_is_written_behind(tmp_path: Path) -> None:
    rig = Rig(tmp_path, host_pages=0)
    rig.engine.submit("s", PROMPT, 60, 1)
    rig.turn(40)
    assert (rig.backend.gathered, rig.engine.store.counters.written_behind) == (0, 0)
    rig.stack.close()


def test_a_request_that_is_sent_back_leaves_clean_pages(tmp_path: Path) -> None:
    rig = Rig(tmp_path, blocks=9)
    rig.engine.submit("a", PROMPT, 90, 1)
    rig.engine.submit("b", PROMPT[::-1], 90, 2)
    while not rig.engine.store.counters.preemptions:
        rig.turn()
    counters = rig.engine.store.counters
    assert counters.swapped_pages > 1
    assert counters.written_behind >= counters.swapped_pages - 1  # but for the partial last page
    rig.engine.settle()
    assert counters.evicted_dirty <= 2  # the partial pages
    assert counters.lost == 0
    rig.stack.close()
