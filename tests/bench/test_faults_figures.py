"""What the faults bench counts, from evidence made by hand."""

from __future__ import annotations

import copy
import random

import pytest

from bench import evidence
from bench.faults_figures import figures, is_green, lost, misses, report
from bench.faults_plan import MOMENTS, TARGETS, plan

EVENTS = [[1, "message.accepted", None], [2, "step.completed", 1], [3, "model.delta", 2], [4, "model.delta", 2]]
EVENTS += [[5, "step.completed", 2], [6, "checkpoint.created", 2], [7, "session.idle", 2]]


def session(kind: str = "session") -> dict:
    return {
        "kind": kind,
        "seed": 7,
        "session": f"ses_{kind}",
        "stuck": False,
        "acknowledged": ["msg_1"],
        "consumed": ["msg_1"],
        "seen": copy.deepcopy(EVENTS),
        "again": copy.deepcopy(EVENTS),
        "deltas": [[2, [[0, [10, 11]], [2, [12]]]]],
        "transcript": [[1, "message", [1, 2]], [2, "model", [10, 11]], [2, "model", [12]]],
        "checkpoints": [1, 2],
        "outputs": ["ok"],
        "failures": [],
        "unknown": [],
        "inside": ["ses/2/0"],
        "outside": ["ses/2/0"],
    }


def run(**changes: object) -> list[dict]:
    faults = [
        {"kind": "fault", "kind_of_fault": "kill", "target": "node", "moment": "think", "recovered_s": seconds}
        for seconds in (1.0, 3.0, None)
    ]
    left = {"kind": "left", "when": "ended", "what": []}
    return [{"kind": "about", "without": []}, session("calm"), {**session(), **changes}, *faults, left]


def test_a_run_that_keeps_every_promise_is_green() -> None:
    figure = figures(run())
    assert is_green(figure)
    assert (figure["kills"], figure["recovery_p50_s"], figure["recovery_p99_s"]) == (3, 3.0, 3.0)
    assert figure["by_kind"] == {"kill node": {"kills": 3, "recovery_p50_s": 3.0, "recovery_p99_s": 3.0}}
    assert any("kill node" in line for line in report(figure))


@pytest.mark.parametrize(
    ("changes", "red"),
    [
        ({"seen": EVENTS[1:]}, "lost"),
        ({"again": EVENTS[:3] + EVENTS[4:]}, "lost"),
        ({"consumed": []}, "lost"),
        ({"deltas": [[2, [[0, [10, 11]]]]]}, "lost"),
        ({"deltas": [[2, [[0, [10, 11]], [1, [12]]]]]}, "lost"),
        ({"checkpoints": [1]}, "lost"),
        ({"failures": ["the model went away"]}, "lost"),
        ({"inside": ["ses/2/0", "ses/2/0"]}, "repeated"),
        ({"outside": ["ses/2/0", "ses/2/0"]}, "repeated"),
        ({"transcript": [[1, "message", [1, 3]], [2, "model", [10, 11, 12]]]}, "diverged"),
        ({"outputs": ["not ok"]}, "diverged"),
        ({"stuck": True}, "stuck"),
    ],
)
def test_a_broken_promise_turns_its_figure_red(changes: dict, red: str) -> None:
    figure = figures(run(**changes))
    assert figure[red] > 0
    assert not is_green(figure)


def test_what_is_left_and_evidence_that_was_touched_are_red() -> None:
    left = {"kind": "left", "when": "stopped", "what": ["process 7"]}
    assert misses(figures([*run(), left])) == ["1 leaked"]
    assert misses(figures(run(), sealed=False)) == ["the evidence is not what was measured"]


def test_nothing_is_proven_by_a_run_in_which_nothing_broke() -> None:
    assert not is_green(figures([line for line in run() if line["kind"] != "fault"]))


def test_a_call_that_a_person_was_asked_about_is_counted() -> None:
    figure = figures(run(unknown=["ses/2/0"]))
    assert is_green(figure)
    assert figure["outcome_unknown"] == 1


def test_what_is_lost_is_told_in_words() -> None:
    assert lost(session()) == []
    assert lost({**session(), "consumed": [], "checkpoints": [1]}) == ["message msg_1", "checkpoint of step 2"]


def test_a_seed_decides_every_fault() -> None:
    first, again = (plan(random.Random("1/2"), 200) for _ in range(2))
    assert first == again
    assert {fault.moment for fault in first} == set(MOMENTS)
    assert {fault.name for fault in first} == {f"{kind} {one}" for kind, targets in TARGETS.items() for one in targets}
    assert "kill dockerd" not in {fault.name for fault in plan(random.Random(1), 200, without=["kill dockerd"])}


def test_evidence_that_was_left_is_read_as_it_was(tmp_path) -> None:
    evidence.leave(tmp_path / "faults.jsonl", run())
    assert figures(*evidence.read(tmp_path / "faults.jsonl")) == figures(run())
