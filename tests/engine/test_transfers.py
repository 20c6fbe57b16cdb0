"""Readers that want the same page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.transfers import Transfers
from kvtier import Loaded, Tier

KEYS = [bytes([n]) * 32 for n in range(4)]


class SlowStack:
    """Gives what is asked once it is let go; keeps a diary."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.began = threading.Semaphore(0)
        self.go = threading.Event()
        self.error: Exception | None = None

    def get(self, keys: Sequence[bytes]) -> list[Loaded | None]:
        self.asked.append(list(keys))
        self.began.release()
        self.go.wait()
        if self.error is not None:
            raise self.error
        return [Loaded(key, Tier.NVME) for key in keys]


@pytest.fixture
def stack() -> SlowStack:
    return SlowStack()


def transfers(stack: SlowStack, staged: dict[bytes, bytes] | None = None) -> Transfers:
    fake: Any = stack
    return Transfers(fake, staged or {})


def test_a_page_that_is_on_its_way_is_not_fetched_again(stack: SlowStack) -> None:
    shared = transfers(stack)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared.get, KEYS[:3])
        stack.began.acquire()
        second = pool.submit(shared.get, KEYS[1:])
        stack.began.acquire()
        stack.go.set()
        assert [page.payload for page in first.result() if page] == KEYS[:3]
        assert [page.payload for page in second.result() if page] == KEYS[1:]
    assert stack.asked == [KEYS[:3], KEYS[3:]]
    assert shared.joined == 2


def test_a_failed_transfer_is_a_miss_for_those_who_joined_it(stack: SlowStack) -> None:
    shared = transfers(stack)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared.get, KEYS[:1])
        stack.began.acquire()
        second = pool.submit(shared.get, KEYS[:1])
        while not shared.joined:
            pass
        stack.error = OSError(5, "Input/output error")
        stack.go.set()
        with pytest.raises(OSError, match="Input/output"):
            first.result()
        assert second.result() == [None]


def test_a_transfer_that_does_not_end_is_a_miss_for_those_who_joined_it(
    stack: SlowStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.transfers.WAIT_S", 0.0)
    shared = transfers(stack)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared.get, KEYS[:1])
        stack.began.acquire()
        assert shared.get(KEYS[:1]) == [None]
        stack.go.set()
        assert first.result() != [None]


def test_when_it_has_landed_the_next_reader_fetches_anew(stack: SlowStack) -> None:
    stack.go.set()
    shared = transfers(stack)
    shared.get(KEYS[:1])
    shared.get(KEYS[:1])
    assert stack.asked == [KEYS[:1], KEYS[:1]]


def test_a_page_that_is_still_being_written_is_taken_from_its_copy(stack: SlowStack) -> None:
    stack.go.set()
    shared = transfers(stack, {KEYS[1]: b"staged"})
    first, second = shared.get(KEYS[:2])
    assert first is not None
    assert second is not None
    assert (first.payload, second.payload) == (KEYS[0], b"staged")
    assert stack.asked == [KEYS[:1]]
