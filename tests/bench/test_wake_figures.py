from __future__ import annotations

from typing import Any

import pytest

from bench.wake_bed import NONE, NVME, STATES
from bench.wake_figures import figures, is_green, misses
from bench.wake_report import report

USABLE_S = {"pinned": 0.001, "host": 0.02, "nvme": 0.04, "shared": 0.05, "none": 2.0}
FIRST_S = {"pinned": 0.1, "host": 0.11, "nvme": 0.13, "shared": 0.14, "none": 2.1}
MB = 1_000_000


def wake(context: int, number: int, state: str, pace: float = 1.0, **changed: Any) -> dict[str, Any]:
    line = {
        "kind": "wake",
        "context": context,
        "round": number,
        "state": state,
        "usable_s": USABLE_S[state] * pace,
        "first_token_s": FIRST_S[state] * pace,
        "tokens": [1, 2, 3, number],
        "sources": {"recomputed": context if state == NONE else 0},
        "foreign_cores": 0.1,
    }
    if state != NONE:
        line["receipt"] = {"status": "accepted", "bytes": 40 * MB}
    return {**line, **changed}


def run() -> list[dict[str, Any]]:
    """Every bar is reached; in the odd rounds the machine was half as fast."""
    lines: list[dict[str, Any]] = [
        {"kind": "about", "model": "m", "threads": 2, "kv_bytes_per_token": 10},
        {"kind": "after", "quarantined": 0, "integrity": "ok"},
    ]
    for context in (256, 2048):
        for number in range(5):
            lines += [wake(context, number, state, 1.0 + number % 2) for state in STATES]
    for number in range(3):
        for read, seconds in (("raw", 0.02), ("tier", 0.04), ("path", 0.024)):
            disk = {"kind": "disk", "context": 2048, "round": number, "read": read}
            lines.append({**disk, "bytes": 40 * MB, "seconds": seconds})
    return lines


def changed(lines: list[dict[str, Any]], state: str, **fields: Any) -> list[dict[str, Any]]:
    return [line | fields if line.get("state") == state else line for line in lines]


def test_ratios_are_of_states_in_the_same_round():
    figure = figures(run())
    assert figure["recompute_over_nvme"] == {"256": 50.0, "2048": 50.0}
    assert figure["host_over_pinned"]["2048"] == 1.1
    assert figure["worst_vs_no_tier"]["256"] == round(0.14 / 2.1, 3)
    assert figure["tier_fraction"] == 0.5
    assert figure["disk_fraction"] == round(0.02 / 0.024, 3)
    assert is_green(figure)


@pytest.mark.parametrize(
    ("state", "fields", "red"),
    [
        (NVME, {"usable_s": 0.5}, "recompute_over_nvme at 2048 is"),
        ("host", {"first_token_s": 0.5}, "host_over_pinned at 2048 is"),
        ("shared", {"first_token_s": 5.0}, "worst_vs_no_tier at 256 is"),
        ("shared", {"tokens": [9, 9, 9, 9]}, "the tokens after a wake depend"),
        (NVME, {"sources": {"recomputed": 16}}, "tokens were computed again"),
        (NVME, {"receipt": {"status": "clipped", "bytes": 1}}, "tokens were computed again"),
    ],
)
def test_each_bar_that_is_missed_is_named(state, fields, red):
    missed = misses(figures(changed(run(), state, **fields)))
    assert [miss for miss in missed if red in miss]


@pytest.mark.parametrize(
    ("kind", "fields", "red"),
    [
        ("after", {"quarantined": 1}, "1 pages did not verify"),
        ("after", {"integrity": "a page is lost"}, "books do not add up: a page is lost"),
        ("disk", {"bytes": MB, "read": "path"}, "disk_fraction was not measured"),
    ],
)
def test_what_the_engine_and_the_disk_say_counts_too(kind, fields, red):
    lines = [line | fields if line["kind"] == kind else line for line in run()]
    assert [miss for miss in misses(figures(lines)) if red in miss]


def test_a_state_that_is_missing_is_not_equal_and_a_bar_without_its_context_is_missed():
    assert not figures([line for line in run() if line.get("state") != "host"])["tokens_equal"]
    short = [line for line in run() if line.get("context") != 2048]
    assert "recompute_over_nvme at 2048 was not measured" in misses(figures(short))
    assert "the evidence is not what was measured" in misses(figures(run(), sealed=False))


def test_the_table_shows_every_state_and_every_miss():
    lines = changed(run(), NVME, usable_s=0.5)
    text = "\n".join(report(lines, figures(lines)))
    for word in ("pinned", "host", "nvme", "shared", "recomputed", "2,048", "MISSED: recompute_over_nvme at 2048"):
        assert word in text
