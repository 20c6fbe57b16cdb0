"""The draft length that pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.capacity.formulas import tokens_per_pass
from engine.doctor.speculation import acceptance_of, best_length, speedup
from tests.doctor.stage import DECODE_S, Stage

SPEEDS = {"prefill_s_per_token": 0.001}


def counted(passes: int, drafted: int, accepted: int) -> dict[str, int]:
    return {"passes": passes, "drafted": drafted, "accepted": accepted}


def decoded(requests: int = 1) -> Stage:
    stage = Stage(512)
    stage.crowd(requests, 20, 60)
    stage.run()
    return stage


@pytest.mark.parametrize(("drafted", "tokens"), [(2, 2.44), (4, 3.36), (6, 3.95)])
def test_a_pass_brings_as_many_tokens_as_is_published(drafted: int, tokens: float):
    assert tokens_per_pass(0.8, drafted) == pytest.approx(tokens, abs=0.005)


@given(st.floats(0.01, 0.99), st.integers(1, 12))
def test_acceptance_is_found_again_from_what_passes_brought(acceptance: float, drafted: int):
    assert acceptance_of(tokens_per_pass(acceptance, drafted), drafted) == pytest.approx(acceptance, abs=1e-6)


@given(st.floats(0, 1), st.integers(1, 64), st.floats(1e-4, 0.1), st.floats(1e-7, 0.1))
def test_no_length_beats_the_best_one(acceptance: float, batch: int, decode_s: float, token_s: float):
    best = best_length(acceptance, batch, decode_s, token_s)
    assert speedup(acceptance, best, batch, decode_s, token_s) >= 1.0
    assert all(
        speedup(acceptance, k, batch, decode_s, token_s) <= speedup(acceptance, best, batch, decode_s, token_s)
        for k in range(17)
    )


def test_an_engine_that_has_verified_no_drafts_is_given_no_length():
    report = decoded().report("speculation")
    assert not report.findings
    assert "too few to say what length pays" in report.notes[0]


def test_few_passes_say_nothing():
    report = decoded().report("speculation", speculation=counted(3, 12, 9), speeds=SPEEDS)
    assert not report.findings
    assert "too few" in report.notes[0]


def test_drafts_that_mostly_fall_are_too_long():
    finding = decoded().findings("speculation", speculation=counted(100, 800, 70), speeds=SPEEDS)
    assert set(finding) == {"speculation.too_long"}
    evidence = finding["speculation.too_long"].evidence
    assert 0 < evidence["best"] < 8
    assert evidence["acceptance"] == pytest.approx(0.41, abs=0.01)


def test_drafts_that_mostly_stand_are_too_short():
    finding = decoded().findings("speculation", speculation=counted(100, 100, 95), speeds=SPEEDS)
    assert set(finding) == {"speculation.too_short"}
    assert finding["speculation.too_short"].evidence["best"] > 4


def test_a_large_batch_pays_for_no_draft_that_seldom_stands():
    speeds = {"prefill_s_per_token": DECODE_S / 8}
    finding = decoded(8).findings("speculation", speculation=counted(100, 400, 20), speeds=speeds)
    assert set(finding) == {"speculation.not_worth_it"}
    assert finding["speculation.not_worth_it"].evidence["best"] == 0


def test_the_length_that_pays_best_gives_no_finding():
    best = best_length(0.6, 1, DECODE_S, 0.001)
    passes = 1000
    accepted = round(passes * (tokens_per_pass(0.6, best) - 1))
    report = decoded().report("speculation", speculation=counted(passes, passes * best, accepted), speeds=SPEEDS)
    assert not report.findings
    assert "60% of drafts stand" in report.notes[0]
