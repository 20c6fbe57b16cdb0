"""Tier I/O away from the compute thread, which here is the test."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from engine.lanes import Lanes

Inbox = queue.SimpleQueue[Callable[[], object]]


@pytest.fixture
def inbox() -> Inbox:
    return queue.SimpleQueue()


@pytest.fixture
def lanes(inbox: Inbox) -> Iterator[Lanes]:
    made = Lanes(inbox.put)
    yield made
    made.close()


def test_a_result_is_told_on_the_compute_thread(lanes: Lanes, inbox: Inbox) -> None:
    told: list[int | None] = []
    lanes.read(lambda: 7, told.append)
    command = inbox.get(timeout=60)
    assert told == []
    command()
    assert told == [7]


def test_readers_are_idle_once_every_result_has_been_told(lanes: Lanes, inbox: Inbox) -> None:
    assert lanes.idle
    lanes.read(lambda: 7, lambda _: None)
    command = inbox.get(timeout=60)
    assert not lanes.idle
    command()
    assert lanes.idle


def test_a_task_that_raises_is_told_as_none_and_counted_and_leaves_the_readers_idle(lanes: Lanes, inbox: Inbox) -> None:
    told: list[Any] = []
    lanes.read(lambda: 1 // 0, told.append)
    for _ in range(2):
        inbox.get(timeout=60)()
    assert (told, lanes.failures, lanes.idle) == ([None], 1, True)


def test_what_waits_for_an_end_is_told_however_that_ended(lanes: Lanes, inbox: Inbox) -> None:
    told: list[str] = []
    ended, failed = Future[None](), Future[None]()
    lanes.after(ended, lambda: told.append("ended"))
    lanes.after(failed, lambda: told.append("failed"))
    assert inbox.empty()
    failed.set_exception(OSError())
    ended.set_result(None)
    for _ in range(2):
        inbox.get(timeout=60)()
    assert told == ["failed", "ended"]


class Stuck:
    """A lane whose first write does not end before it is let go, by a clock that the test moves."""

    def __init__(self, inbox: Inbox) -> None:
        self.now = 0.0
        self.inbox = inbox
        self.told: list[tuple[str, int | None]] = []
        self.go, self.begun = threading.Event(), threading.Event()
        self.lanes = Lanes(inbox.put, clock=lambda: self.now, deadlines_s=(10.0, 50.0))
        self.lanes.write(self._wait, lambda result: self.told.append(("first", result)))
        self.begun.wait()

    def _wait(self) -> int:
        self.begun.set()
        self.go.wait()
        return 1

    def write(self, name: str, *, shared: bool = False) -> None:
        self.lanes.write(lambda: 2, lambda result: self.told.append((name, result)), shared=shared)

    def hear(self, count: int) -> None:
        for _ in range(count):
            self.inbox.get(timeout=60)()


@pytest.fixture
def stuck(inbox: Inbox) -> Iterator[Stuck]:
    made = Stuck(inbox)
    yield made
    made.go.set()
    made.lanes.close()


def test_a_write_that_never_ends_is_answered_with_none_at_its_deadline(stuck: Stuck) -> None:
    stuck.write("second")
    stuck.now = 9.0
    assert stuck.lanes.overdue(stuck.now) == 1.0
    assert stuck.told == []
    stuck.now = 10.0
    assert stuck.lanes.overdue(stuck.now) is None
    assert stuck.told == [("first", None), ("second", None)]
    assert stuck.lanes.overdue_writes == 2


def test_what_comes_to_a_stuck_lane_is_answered_at_once(stuck: Stuck) -> None:
    stuck.lanes.overdue(10.0)
    stuck.write("third")
    stuck.hear(1)
    assert stuck.told == [("first", None), ("third", None)]


def test_a_lane_that_moves_again_is_used_again_and_nobody_is_answered_twice(stuck: Stuck) -> None:
    stuck.write("second")
    stuck.lanes.overdue(10.0)
    stuck.go.set()
    stuck.hear(2)
    assert stuck.told == [("first", None), ("second", None)]
    stuck.write("fourth")
    stuck.hear(1)
    assert stuck.told[-1] == ("fourth", 2)


def test_a_long_queue_that_moves_is_not_late(stuck: Stuck) -> None:
    stuck.write("second")
    stuck.now = 9.0
    stuck.go.set()
    stuck.hear(2)
    assert stuck.told == [("first", 1), ("second", 2)]
    stuck.write("third")
    assert stuck.lanes.overdue(18.0) == 1.0
    stuck.hear(1)
    assert stuck.lanes.overdue(100.0) is None


def test_the_shared_store_has_a_lane_and_a_deadline_of_its_own(stuck: Stuck) -> None:
    stuck.write("shared", shared=True)
    stuck.hear(1)
    assert stuck.told == [("shared", 2)]
    stuck.lanes.overdue(10.0)
    stuck.write("shared", shared=True)
    stuck.hear(1)
    assert stuck.told[-1] == ("shared", 2)
