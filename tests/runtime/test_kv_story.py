"""The decision log as sentences."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.kv_story import sentence, story

ROW: dict[str, Any] = {
    "step": 3,
    "decided_at": "2026-03-01T12:00:00.250000+00:00",
    "reason": "tool_started",
    "action": "store",
    "place": "host",
    "tokens": 2048,
    "bytes": 47_185_920,
    "predicted_s": 0.02,
    "realised_s": 0.025,
    "instead_s": 1.5,
    "status": "done",
    "detail": "",
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {},
            "copied 2,048 tokens (47.2 MB) to host memory, because a tool started: took 25.0 ms; 20.0 ms expected;"
            " computing them takes 1.50 s",
        ),
        (
            {"action": "restore", "place": "host+nvme", "reason": "scheduled"},
            "read 2,048 tokens (47.2 MB) back from host memory and NVMe, because it was its turn: took 25.0 ms;"
            " 20.0 ms expected; computing them takes 1.50 s",
        ),
        (
            {"action": "prefetch", "place": "nvme", "reason": "tool_ended"},
            "read 2,048 tokens (47.2 MB) back from NVMe ahead of its turn, because the tool ended: took 25.0 ms;"
            " 20.0 ms expected; computing them takes 1.50 s",
        ),
        (
            {"action": "evict", "place": "device", "reason": "pressure", "status": "open", "realised_s": None},
            "let the device forget 2,048 tokens (47.2 MB), because others needed the place: 20.0 ms if it comes back;"
            " it has not yet",
        ),
        (
            {"action": "evict", "place": "nvme", "reason": "pressure", "realised_s": 0.0005},
            "let NVMe forget 2,048 tokens (47.2 MB), because others needed the place: 20.0 ms if it comes back;"
            " it did, and that took 500 µs",
        ),
        (
            {"action": "evict", "place": "device", "status": "moot", "realised_s": 0.0, "detail": "the session ended"},
            "let the device forget 2,048 tokens (47.2 MB), because a tool started: 20.0 ms if it comes back;"
            " it never did (the session ended)",
        ),
        (
            {"action": "recompute", "place": "device", "reason": "scheduled", "realised_s": 1.6, "predicted_s": 1.5},
            "computed 2,048 tokens again, because its pages were gone: took 1.60 s; 1.50 s expected",
        ),
        (
            {"action": "keep", "place": "device", "realised_s": None, "predicted_s": None, "detail": "too short"},
            "left 2,048 tokens (47.2 MB) on the device without a copy, because a tool started (too short)",
        ),
        (
            {"action": "pin", "place": "device", "reason": "asked", "realised_s": 0.0, "detail": "held for 2.0 s"},
            "pinned 2,048 tokens (47.2 MB) on the device, because it was asked for (held for 2.0 s)",
        ),
        ({"status": "failed", "detail": "the disk is full"}, "because a tool started: it failed (the disk is full)"),
        ({"status": "open", "realised_s": None, "instead_s": None}, "because a tool started: under way"),
        (
            {"action": "drop", "place": "everywhere", "reason": "asked", "realised_s": None, "instead_s": None},
            "forgot 2,048 tokens (47.2 MB) everywhere, because it was asked for",
        ),
        ({"action": "shuffle", "place": "attic", "realised_s": None, "instead_s": None}, "shuffle of 2,048 tokens"),
    ],
)
def test_a_decision_is_a_sentence(changes: dict[str, Any], says: str) -> None:
    told = sentence({**ROW, **changes})
    assert told == says or (says in told and len(says) < 60)


def test_a_story_has_a_heading_for_each_day_and_a_line_for_each_decision() -> None:
    later = {**ROW, "step": 0, "decided_at": "2026-03-03T01:00:00+00:00"}
    lines = story([ROW, ROW, later])
    assert [line.startswith("2026-03-0") for line in lines] == [True, False, False, True, False]
    assert "step 3" in lines[1]
    assert "step" not in lines[4]


def test_nothing_is_no_story() -> None:
    assert story([]) == []
