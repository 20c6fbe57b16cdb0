"""A full pool, and what each of the six remedies would bring."""

from __future__ import annotations

import pytest

from engine.scheduler import Budget
from tests.doctor.stage import Stage, owed


def full(blocks: int = 24) -> Stage:
    stage = Stage(blocks)
    stage.crowd(10, 100, 60)
    return stage


def test_a_pool_with_room_is_large_enough():
    stage = Stage(256)
    stage.crowd(8, 60, 40)
    stage.run()
    report = stage.report("pool")
    assert not report.findings
    assert "large enough" in report.notes[0]


def test_few_steps_say_nothing_of_the_pool():
    stage = full()
    stage.run(5)
    assert "too few" in stage.report("pool").notes[0]


def test_requests_that_wait_for_pages_while_few_decode_are_a_full_pool():
    stage = full()
    stage.run()
    evidence = stage.findings("pool")["pool.full"].evidence
    assert evidence["waiting_share"] > 0.5
    assert evidence["decoding"] < 4 < evidence["most_running"]
    assert evidence["tokens_each"] == pytest.approx(130, abs=40)


def test_requests_that_wait_because_enough_run_are_no_full_pool():
    stage = Stage(512, budget=Budget(running=2))
    stage.crowd(8, 60, 40)
    stage.run()
    assert not stage.report("pool").findings


def test_there_are_six_remedies_the_free_one_first_each_with_a_figure():
    stage = Stage(32)
    stage.submit("pinned", [3] * 64, 2, 0)
    stage.run()
    stage.store.pin(stage.store.sessions.get("pinned"), 8)
    stage.crowd(10, 100, 60)
    for _ in range(40):
        stage.run(1)
    bill = owed("bf16", weights_bytes=10**8, pool_tokens=512)
    remedies = stage.findings("pool", bill=bill)["pool.full"].remedies
    assert len(remedies) == 6
    useful = [remedy for remedy in remedies if remedy.gain]
    assert useful[0].set == "tenuto kv release SESSION"
    assert useful[0].gain == stage.store.pinned_pages * 16 > 0
    assert [remedy.unit for remedy in useful] == ["tokens"] * len(useful)
    assert [remedy for remedy in remedies if not remedy.gain] == list(remedies[len(useful) :])
    by_setting = {remedy.set.split("=")[0]: remedy for remedy in remedies}
    weights = by_setting["TENUTO_ENGINE_DTYPE"]
    assert weights.gain == pytest.approx(10**8 / 2 / 256, rel=0.001)
    assert by_setting["TENUTO_KV_DTYPE"].gain == 0  # there is no smaller KV than bf16 on a cpu
    assert by_setting["`tenuto node` on another machine"].gain == 512


def test_where_nothing_is_pinned_the_first_remedy_is_memory_that_lies_unused():
    stage = full()
    stage.run()
    remedies = stage.findings("pool")["pool.full"].remedies
    assert remedies[0].set.startswith("TENUTO_KV_TOKENS=")
    assert remedies[0].gain == 32 * 512 - 24 * 16  # more than 32 requests of the whole context could hold is no use
    assert "requests more at once" in remedies[0].effect
