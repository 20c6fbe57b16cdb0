"""A broken tail: each suspect provoked on a real core, and named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.backends.face import Tile
from engine.backends.moves import Copied
from engine.scheduler import Budget
from kvtier import TierStack
from tests.doctor.stage import Recorded, Stage, Timed
from tests.engine.test_preemption import tiers


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[TierStack]:
    opened = tiers(tmp_path)
    yield opened
    opened.close()


def test_a_healthy_load_has_a_whole_tail():
    stage = Stage(256)
    stage.crowd(4, 60, 60)
    stage.run()
    report = stage.report("tail")
    assert not report.findings
    assert "the tail is whole" in report.notes[0]


def test_an_engine_that_sampled_nothing_has_no_tail():
    assert "no tokens have been sampled yet" in Stage(8).report("tail").notes[0]


def test_requests_that_wait_for_others_to_end_are_queueing():
    stage = Stage(256, budget=Budget(running=1))
    stage.crowd(6, 20, 20)
    stage.run()
    findings = stage.findings("tail")
    assert set(findings) == {"tail.queueing"}
    assert findings["tail.queueing"].evidence["waits"] == 4
    assert findings["tail.queueing"].evidence["share"] > 0.9


def test_a_long_prompt_beside_a_stream_is_prefill_interference():
    stage = Stage(256, budget=Budget(prefill_beside_decode=256, stretch=0))
    stage.timed.token_s = 0.001
    stage.crowd(1, 20, 80)
    stage.run(40)
    stage.crowd(1, 1500, 1)
    stage.run()
    report = stage.report("tail")
    assert [finding.name for finding in report.findings] == ["tail.prefill"]
    assert report.findings[0].evidence["p50_s"] == pytest.approx(0.02)
    assert report.findings[0].evidence["longest_s"] > 0.2
    assert sum(note.startswith("ruled out:") for note in report.notes) == 5


def test_what_is_ruled_out_is_said_in_the_order_of_the_suspects():
    stage = Stage(256, budget=Budget(prefill_beside_decode=256, stretch=0))
    stage.timed.token_s = 0.001
    stage.crowd(1, 20, 80)
    stage.run(40)
    stage.crowd(1, 1500, 1)
    stage.run()
    said = [note for note in stage.report("tail").notes if note.startswith("ruled out:")]
    words = ["waiting to be admitted", "being sent back", "the host between", "pages on their way", "not recorded yet"]
    assert [word in note for word, note in zip(words, said, strict=True)] == [True] * 5


def test_requests_that_are_sent_back_are_preemption(stack: TierStack):
    stage = Stage(8, stack)
    for _ in range(5):
        stage.crowd(2, 20, 90)
        stage.run()
    assert stage.store.counters.preemptions > 3
    findings = stage.findings("tail")
    assert "tail.preemption" in findings
    assert findings["tail.preemption"].evidence["waits"] >= 3
    assert not {"tail.host_stall", "tail.graph_miss", "tail.prefill", "tail.unexplained"} & set(findings)


def test_a_host_that_has_something_else_to_do_is_a_host_stall():
    stage = Stage(256)
    stage.crowd(2, 20, 100)
    for _ in range(4):
        stage.run(20)
        stage.now_s += 0.4  # between two steps, while two generations run
    stage.run()
    assert set(stage.findings("tail")) == {"tail.host_stall"}


def test_time_in_which_nobody_waits_is_no_stall():
    stage = Stage(256)
    for _ in range(5):
        stage.crowd(1, 20, 20)
        stage.run()
        stage.now_s += 60.0
    assert not stage.report("tail").findings


def test_a_slow_tier_is_tier_io_and_is_named(stack: TierStack):
    stage = Stage(64, stack)
    stage.crowd(3, 70, 10)
    stage.run()
    for told in list(stage.told):
        stage.kv("offload", told.session, tier="host", evict=True)
    stage.settle()
    for key in stage.store.pool.indexed():
        stage.store.pool.forget(key)
    stage.slow_tier_s = 0.7
    for told in list(stage.told):
        stage.submit(told.session, [*told.prompt, *told.tokens], 5, 1, known=80)
        stage.run()
    findings = stage.findings("tail")
    assert set(findings) == {"tail.tier_io"}
    assert findings["tail.tier_io"].evidence["host_tokens"] > 0


class SlowCopies(Timed):
    """A page that is copied for a tier takes a third of a second of the compute thread."""

    def gather(self, pages: Sequence[tuple[int, int]]) -> Copied:
        assert self.stage is not None
        self.stage.now_s += 0.3
        return super().gather(pages)


def test_copies_for_a_tier_that_hold_up_the_compute_thread_are_tier_io(stack: TierStack):
    stage = Stage(128, stack, backend=SlowCopies(128))
    stage.crowd(5, 70, 2)
    stage.run()
    others = [told.session for told in stage.told]
    stage.submit("a stream", [60] * 20, 120, 0)
    for session in others:
        stage.run(15)
        stage.kv("offload", session, tier="host")
    stage.run()
    assert set(stage.findings("tail")) == {"tail.tier_io"}


def test_pages_that_must_be_copied_out_before_a_step_can_run_are_eviction(stack: TierStack):
    stage = Stage(16, stack, backend=SlowCopies(16))
    for number in range(6):
        stage.submit(f"s{number}", [number + 3] * 90, 2, number)  # too short to be copied while it decodes
        stage.run()
    stage.submit("a stream", [60] * 20, 150, 0)
    stage.run()
    assert stage.store.counters.evicted_dirty > 3
    assert "tail.preemption" in stage.findings("tail")


def test_batch_sizes_that_are_recorded_late_are_graph_misses():
    stage = Stage(256, backend=Recorded(256))
    for _ in range(4):
        stage.crowd(2, 20, 200)
        stage.run(30)
    stage.run()
    findings = stage.findings("tail")
    assert set(findings) == {"tail.graph_miss"}
    assert findings["tail.graph_miss"].evidence["missed_steps"] >= 3


def test_steps_that_are_slow_for_no_reason_are_said_to_be():
    class Throttled(Timed):
        def seconds(self, tiles: Sequence[Tile]) -> float:
            return super().seconds(tiles) * (12 if len(self.steps) % 40 == 0 else 1)

    stage = Stage(256, backend=Throttled(256))
    stage.crowd(1, 20, 200)
    stage.run()
    assert set(stage.findings("tail")) == {"tail.unexplained"}


def test_a_wait_is_made_of_what_it_was_too_long():
    stage = Stage(256, budget=Budget(running=1))
    stage.crowd(6, 20, 20)
    stage.run()
    for wait in stage.figures().waits:
        assert sum(wait.made_of.values()) == pytest.approx(wait.seconds - wait.usual_s, rel=0.1)
