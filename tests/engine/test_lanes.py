"""Tier I/O away from the compute thread, which here is the test."""

from __future__ import annotations

import queue
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
