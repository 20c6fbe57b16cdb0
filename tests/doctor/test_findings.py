"""Every finding that there is: written down, provoked, and told the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import doctor
from engine.doctor.findings import found
from engine.external.figures import Figures
from engine.scheduler import Budget
from runtime import doctor_page
from tests.doctor.stage import Stage

TESTS = Path(__file__).parent


def test_the_page_is_what_the_findings_say():
    assert doctor_page.OUT.read_text() == doctor_page.document(), "run `python -m runtime.doctor_page`"


@pytest.mark.parametrize("name", doctor.KNOWN)
def test_every_finding_is_provoked_by_a_test(name: str):
    part = name.partition(".")[0]
    assert f'"{name}"' in (TESTS / f"test_{part}.py").read_text()
    assert part in doctor.PARTS


def test_a_finding_has_the_evidence_that_is_written_down():
    with pytest.raises(AssertionError, match="other evidence"):
        found("pool.full", {"steps": 1}, "")


def test_a_healthy_node_has_no_finding_in_any_part():
    stage = Stage(512)
    for _ in range(3):
        stage.crowd(8, 100, 60)
        stage.run()
    reports = doctor.examine(stage.figures())
    assert [report.part for report in reports] == list(doctor.PARTS)
    assert not [finding for report in reports for finding in report.findings]
    assert all(report.notes for report in reports)


def test_an_engine_that_has_done_nothing_yet_has_no_finding():
    assert not [finding for report in doctor.examine(Stage(8).figures()) for finding in report.findings]


def test_of_an_engine_in_front_of_a_model_server_it_says_what_is_external():
    told = Figures()
    what = doctor.figures("node-1", {"backend": "openai"}, told.stats(0, 0), told.spans())
    reports = doctor.examine(what)
    assert [(one.part, one.findings, one.notes) for one in reports] == [
        (part, (), (doctor.EXTERNAL[part],)) for part in doctor.PARTS
    ]


def test_one_part_may_be_asked_for():
    assert [report.part for report in doctor.examine(Stage(8).figures(), "tail")] == ["tail"]


def test_what_lies_longer_than_ten_minutes_back_counts_no_more():
    stage = Stage(256, budget=Budget(running=1))
    stage.crowd(6, 20, 20)
    stage.run()
    assert stage.findings("tail")
    stage.now_s += 601
    assert not stage.findings("tail")
    assert not stage.figures().steps
