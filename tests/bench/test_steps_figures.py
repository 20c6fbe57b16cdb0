"""What the steps bench computes, from evidence made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bench import evidence
from bench.steps_figures import figures, is_green, misses, report

BARE_S = 0.012


def wall(seconds: float) -> dict[str, float]:
    return {"dispatch_s": seconds / 4, "inside_s": seconds / 2, "hop_s": seconds / 4}


def run(beside_s: float = 0.015, held_kb: float = 50.0, idle: int = 4) -> list[dict[str, Any]]:
    """Two rounds of a think and a tool step; four sessions parked."""
    lines: list[dict[str, Any]] = []
    for number in range(2):
        pace = 1.0 + number  # the second round's machine was half as fast
        for place, (step, own_s) in enumerate((("think", 0.2), ("run_tools", 0.0))):
            bare = wall(BARE_S * pace + own_s)
            lines.append({"kind": "bare", "round": number, "place": place, "engine_s": own_s, **bare})
            about = {"round": number, "place": place, "step": step, "workflow": "w", "activity": f"{number}{step}"}
            call_s = 0.0 if own_s else 0.5
            took = wall(beside_s * pace + own_s + call_s)
            lines.append({"kind": "step", "engine_s": own_s, **about, **took})
            if call_s:
                lines.append({"kind": "span", "name": "tool", "seconds": 0.51, "inside_s": call_s, **about})
            lines.append({"kind": "span", "name": "begin tx", "seconds": 0.004, "inside_s": None, **about})
        seconds = {"node": 0.02, "temporal": 0.01, "engine": 5.0}
        lines.append({"kind": "cpu", "round": number, "steps": 2, "seconds": seconds})
    before = dict.fromkeys(("api", "worker", "temporal"), 10_000_000)
    after = {**before, "api": 10_000_000 + int(held_kb * 1024 * 4)}
    lines.append({"kind": "memory", "sessions": 4, "before": before, "after": after, "woken": after})
    lines += [{"kind": "wake", "started_s": 0.03, "token_s": 0.05} for _ in range(4)]
    return [*lines, {"kind": "rest", "states": {"idle": idle}}]


def test_a_step_is_compared_with_the_bare_activity_in_its_place() -> None:
    figure = figures(run())
    assert is_green(figure)
    assert figure["overhead_ratio"] == 1.25
    assert figure["overhead_ratio_by_step"] == {"think": 1.25, "run_tools": 1.25}
    assert figure["overhead_ms"] == {"think": 22.5, "run_tools": 22.5}
    assert figure["overhead_cpu_ms"] == 15.0
    assert figure["ram_kb_per_parked"]["api_worker"] == 50.0
    assert (figure["wake_p50_ms"], figure["woken"]) == (30.0, 4)
    assert figure["breakdown_ms"]["run_tools"]["begin tx"] == 4.0
    assert any("begin tx" in line for line in report(figure))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"beside_s": 0.02}, "a step costs 1.67 bare activities"),
        ({"held_kb": 200.0}, "holds 200.0 KB of api and worker"),
        ({"idle": 3}, "3 of 4 sessions rest"),
    ],
)
def test_a_bar_that_is_not_reached_is_named(changes: dict[str, Any], said: str) -> None:
    [missed] = misses(figures(run(**changes)))
    assert said in missed


def test_evidence_that_was_altered_is_red(tmp_path) -> None:
    evidence.leave(tmp_path / "steps.jsonl", run())
    assert is_green(figures(*evidence.read(tmp_path / "steps.jsonl")))
    evidence.alter(tmp_path / "steps.jsonl", "step", "inside_s", 0.1)
    assert misses(figures(*evidence.read(tmp_path / "steps.jsonl"))) == ["the evidence is not what was measured"]
