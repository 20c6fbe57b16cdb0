"""The decision log: told in order of change, bounded, settled once, and replayable from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.decisions import DecisionLog
from engine.errors import RequestError
from kvtier.policy import Place, Prefill, Reason, SessionView, State, TierView, View


def filled(count: int, **options: object) -> DecisionLog:
    log = DecisionLog(clock=lambda: 5.0, **options)  # type: ignore[arg-type]
    for index in range(count):
        log.add(f"s{index}", "asked", "store", "host", step=index, tokens=16, bytes=64)
    return log


def test_entries_are_told_once_and_again_when_they_change() -> None:
    log = filled(3)
    version, told = log.since(0)
    assert [entry["session"] for entry in told] == ["s0", "s1", "s2"]
    assert log.since(version) == (version, [])
    first = next(entry for entry in log._entries.values() if entry.session == "s0")
    log.settle(first, 0.5)
    newer, changed = log.since(version)
    assert [(entry["seq"], entry["status"], entry["realised_s"]) for entry in changed] == [(1, "done", 0.5)]
    assert newer > version


def test_an_entry_is_settled_once() -> None:
    log = filled(1)
    (entry,) = log._entries.values()
    log.settle(entry, 0.5)
    log.settle(entry, 9.0, "failed", "late")
    assert (entry.status, entry.realised_s, entry.detail) == ("done", 0.5, "")


def test_a_page_of_the_log_goes_on_where_it_ended() -> None:
    log, told, version = filled(5), [], 0
    while True:
        version, entries = log.since(version, limit=2)
        if not entries:
            break
        told += [entry["session"] for entry in entries]
    assert told == [f"s{index}" for index in range(5)]


def test_the_log_is_bounded_and_counts_what_it_lost() -> None:
    log = filled(10, kept=4)
    assert len(log.since(0)[1]) == 4
    assert log.dropped == 6


def view() -> View:
    sessions = {"s": SessionView("s", 100, State.TOOL, 0.0)}
    return View(1.0, Reason.TOOL_STARTED, "s", sessions, (TierView(Place.DEVICE, 10, 0),), Prefill(1e-3), 8)


def test_a_file_that_has_grown_large_is_set_aside(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    log = DecisionLog(file, file_bytes=700)
    for _ in range(4):
        task = log.whole(view(), [])
        assert task is not None
        task()
    sizes = [path.stat().st_size for path in (file, tmp_path / "log.jsonl.1")]
    assert all(0 < size <= 700 for size in sizes)


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "no" / "such" / "folder.jsonl")
    task = log.whole(view(), [])
    assert task is not None
    task()
    assert log.file_failures == 1
    with pytest.raises(RequestError, match="cannot be written: No such file or directory; name another file"):
        log.check()


@pytest.mark.parametrize("version", [0, 7])
def test_an_empty_log_says_nothing(version: int) -> None:
    assert DecisionLog().since(version) == (version, [])
