"""What the sandboxes bench computes, from evidence made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import evidence
from bench.sandbox_figures import figures, is_green, misses, report


def run(
    claim_s: float = 0.010, call_s: float = 0.002, snapshot_s: float = 0.010, docker: bool = True, tried: int = 40
) -> list[dict[str, Any]]:
    """Three rounds; Docker's own ways take 200, 60 and 80 ms."""
    lines: list[dict[str, Any]] = [{"kind": "about", "driver": "docker" if docker else "bubblewrap", "load": 0.5}]
    for number in range(3):
        lines.append({"kind": "claim", "s": claim_s * (1 + number), "ready": number < 2, "right": True})
        lines.append({"kind": "call", "s": call_s, "right": True})
        lines.append({"kind": "snapshot", "s": snapshot_s, "right": True})
        lines.append({"kind": "restore", "s": 0.3, "right": True})
        if docker:
            lines.append({"kind": "docker_run", "s": 0.4})
            lines.append({"kind": "docker_exec", "s": 0.06, "right": True})
            lines.append({"kind": "docker_commit", "s": 0.08})
    attempts = [
        {"kind": "escape", "driver": "bubblewrap", "name": str(n), "got": "", "why": "EPERM"} for n in range(40)
    ]
    if docker:
        attempts += [{**each, "driver": "docker"} for each in attempts[:tried]]
    return lines + attempts


def test_each_way_is_compared_with_docker_s_own_at_the_median() -> None:
    figure = figures(run(), True)
    assert is_green(figure)
    assert (figure["claim_p50_ms"], figure["docker_run_p50_ms"], figure["claim_times"]) == (20.0, 400.0, 20.0)
    assert (figure["call_times"], figure["snapshot_times"], figure["restore_p50_ms"]) == (30.0, 8.0, 300.0)
    assert (figure["claim_p99_ms"], figure["claims"], figure["claims_missed"]) == (30.0, 3, 1)
    assert (figure["escapes_tried"], figure["escapes"]) == (80, 0)
    assert any("docker exec" in line for line in report(figure))


def test_without_docker_its_figures_are_null_and_nothing_is_compared() -> None:
    figure = figures(run(docker=False), True)
    assert is_green(figure)
    assert figure["docker_run_p50_ms"] is None
    assert figure["claim_times"] is None
    assert report(figure)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"claim_s": 0.014}, "a claim is 14.29 times faster than docker run"),
        ({"call_s": 0.004}, "a call is 15 times faster than docker exec"),
        ({"snapshot_s": 0.02}, "a snapshot is 4 times faster than docker commit"),
        ({"tried": 39}, "fewer than 40 attempts were made on docker"),
    ],
)
def test_what_misses_its_bar_is_said(changes: dict[str, Any], said: str) -> None:
    figure = figures(run(**changes), True)
    assert not is_green(figure)
    assert said in " ".join(misses(figure))


def test_one_attempt_that_got_out_or_one_wrong_answer_is_red() -> None:
    lines = run()
    out = [{**line, "got": "the host's shadow file"} if line.get("name") == "7" else line for line in lines]
    assert "2 attempts got out" in misses(figures(out, True))
    wrong = [{**line, "right": False} if line["kind"] == "restore" else line for line in lines]
    assert "3 answers, snapshots or restores were wrong" in misses(figures(wrong, True))


def test_evidence_that_was_improved_is_red(tmp_path: Path) -> None:
    path = tmp_path / "sandbox.jsonl"
    evidence.leave(path, run())
    assert is_green(figures(*evidence.read(path)))
    evidence.alter(path, "claim", "s", 0.5)
    assert misses(figures(*evidence.read(path))) == ["the evidence was altered"]
