"""Captured decode steps: nothing is allocated, nothing moves, nothing is captured twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from engine.backends import Tile, captured
from engine.facts import PAGE_SIZE
from engine.native import Decoder, Job
from engine.native.structs import address
from tests.engine.conftest import Loaded
from tests.engine.test_cpu import DTYPES, ids, prompt

BLOCKS = 32  # of one sequence; its contexts reach the third segment of attention
VARYING = ("attend", "merge")  # their items follow the lengths of contexts


@dataclass(frozen=True)
class Replay:
    """What one decode step did."""

    allocations: int
    captures: int
    jobs: list[Job]
    logits: list[int | None]  # addresses


class Rig:
    def __init__(self, loaded: Loaded, dtype: str, rows: int) -> None:
        self.backend = loaded.backend("cpu", dtype, 5 * BLOCKS)
        self.tokens = ids(BLOCKS * PAGE_SIZE, loaded.facts.vocab)
        self.rows = rows
        for row in range(rows):
            self.backend.forward([shifted(tile, row) for tile in prompt(self.tokens[: self.start(row)])])

    def start(self, row: int) -> int:
        return 250 + 30 * row

    def step(self, number: int) -> Replay:
        tiles = []
        for row in range(self.rows):
            at = self.start(row) + number
            table = tuple(range(at // PAGE_SIZE + 1))
            tiles.append(shifted(Tile(table, at % PAGE_SIZE, (self.tokens[at],), True), row))
        decoder = self.backend._decoder
        with decoder.watch() as jobs:
            before = decoder.library.allocations
            logits = self.backend.forward(tiles)
            after = decoder.library.allocations
        return Replay(after - before, self.backend._captured.captures, jobs, [address(row) for row in logits])

    def replays(self, before_each: Callable[[], object] = lambda: None) -> list[Replay]:
        """Steps over the end of pages and of a segment, after one that captures."""
        self.step(0)
        found = []
        for number in range(1, 40):
            before_each()
            found.append(self.step(number))
        return found


def shifted(tile: Tile, row: int) -> Tile:
    return Tile(tuple(block + row * BLOCKS for block in tile.blocks), tile.row, tile.tokens, tile.wants_logits)


def faults(replays: list[Replay]) -> set[str]:
    """How decode steps differ from replays of one captured step."""
    first = replays[0]
    found = set()
    for replay in replays:
        if replay.allocations:
            found.add("allocates")
        if replay.captures != first.captures:
            found.add("captures again")
        if replay.logits != first.logits:
            found.add("moves its logits")
        if [place(job) for job in replay.jobs] != [place(job) for job in first.jobs]:
            found.add("moves its buffers")
        if [shares(job) for job in replay.jobs] != [shares(job) for job in first.jobs]:
            found.add("dispatches otherwise")
    return found


def place(job: Job) -> tuple[int, int]:
    return job.source, job.target


def shares(job: Job) -> tuple[str, int, int]:
    return job.kind, job.layer, 0 if job.kind in VARYING else job.items


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replay_allocates_nothing_moves_nothing_and_dispatches_what_was_recorded(
    tiny: Loaded, dtype: str, rows: int
) -> None:
    replays = Rig(tiny, dtype, rows).replays()
    assert faults(replays) == set()
    assert [job.kind for job in replays[0].jobs[:3]] == ["embed", "attention_norm", "qkv"]
    assert len(replays[0].jobs) == 1 + 9 * tiny.facts.layers + 2


def test_the_arrays_of_a_captured_step_stay_where_they_are(tiny: Loaded) -> None:
    rig = Rig(tiny, "bf16", 2)
    arrays = rig.backend.capture(2).arrays
    kept = [array.ctypes.data for array in vars(arrays).values()]
    for replay in rig.replays():
        assert replay.jobs[0].source == arrays.tokens.ctypes.data
        assert replay.jobs[-1].target == arrays.logits.ctypes.data
    assert [array.ctypes.data for array in vars(rig.backend.capture(2).arrays).values()] == kept


def test_scratch_that_is_too_small_is_seen_as_an_allocation(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = Decoder.capture
    monkeypatch.setattr(Decoder, "capture", lambda self, pool, step, pages: roomy(self, pool, step, 1))
    assert "allocates" in faults(Rig(tiny, "bf16", 1).replays())


def test_a_step_captured_anew_each_time_is_seen(tiny: Loaded) -> None:
    rig = Rig(tiny, "bf16", 1)
    assert {"captures again", "allocates"} <= faults(rig.replays(rig.backend._captured._steps.clear))


def test_a_step_that_is_not_captured_is_seen(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.cpu.is_decode", lambda tiles: False)
    kept: list[Any] = []
    fresh = np.empty
    monkeypatch.setattr(np, "empty", lambda *given: kept.append(fresh(*given)) or kept[-1])
    assert {"moves its logits", "moves its buffers"} <= faults(Rig(tiny, "bf16", 1).replays())


def test_a_job_more_or_less_is_seen_as_another_dispatch(tiny: Loaded) -> None:
    first, second, *_ = Rig(tiny, "bf16", 2).replays()
    jobs = [replace(job, items=job.items + (job.kind == "qkv")) for job in second.jobs]
    assert faults([first, second]) == set()
    assert faults([first, replace(second, jobs=jobs)]) == {"dispatches otherwise"}
    assert "dispatches otherwise" in faults([first, replace(second, jobs=second.jobs[1:])])


def test_a_context_that_outgrows_its_block_table_has_the_step_captured_again_with_twice_the_pages(
    tiny: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "_FIRST_PAGES", 4)
    rig = Rig(tiny, "bf16", 1)
    rig.step(0)
    assert (rig.backend._captured.captures, rig.backend.capture(1).pages) == (1, 16)
    rig.step(6)
    assert (rig.backend._captured.captures, rig.backend.capture(1).pages) == (2, 32)
    rig.step(7)
    assert rig.backend._captured.captures == 2


def test_a_step_runs_in_the_smallest_bucket_that_holds_it(tiny: Loaded) -> None:
    backend = tiny.backend("cpu", "bf16", 40)
    tiles = [Tile((block,), 0, (5,), True) for block in range(40)]
    for rows in (1, 2, 3, 4, 7, 31):
        backend.forward(tiles[:rows])
    assert sorted(backend._captured._steps) == [1, 2, 4, 8, 32]
    alone = backend.forward(tiles[:1])[0].copy()
    assert all(np.array_equal(alone, row) for row in backend.forward(tiles))  # forty: too many for a captured step
    assert backend._captured.captures == 5


def test_capturing_before_the_first_request_leaves_nothing_to_capture(tiny: Loaded) -> None:
    backend = tiny.backend("cpu", "bf16", 8)
    assert [backend.capture(batch).batch for batch in (1, 8)] == [1, 8]
    backend.forward([Tile((block,), 0, (5,), True) for block in range(6)])
    assert backend._captured.captures == 2
