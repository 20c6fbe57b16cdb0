"""Several reads in flight, none waited for longer than a deadline.

A thread that hangs in the kernel cannot be called back. So a read that is late is given up, not ended: its
thread is lost until the kernel answers, and while every thread is lost, reads are misses at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Readers:
    """A bounded pool of threads that belongs to one tier, so that a tier that hangs holds up no other."""

    def __init__(self, threads: int, deadline_s: float, name: str) -> None:
        self._threads, self._deadline_s = threads, deadline_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kvtier-{name}")
        self._lock = threading.Lock()
        self._late: set[Future[Any]] = set()

    def map(self, read: Callable[[Item], Result], items: Sequence[Item]) -> list[Result | None]:
        """Results in the order of the items; None for what did not come back within the deadline."""
        return [one.result() if came_back(one) else None for one in self.run(read, items)]

    @property
    def threads(self) -> int:
        return self._threads

    def run(
        self, read: Callable[[Item], Result], items: Sequence[Item], deadline_s: float | None = None
    ) -> list[Future[Result]]:
        """As `map`, but a read that did not come back can be told apart: its future is cancelled where it never began,
        and otherwise not done before its thread is.

        The deadline runs anew whenever one comes back: a long queue that moves is not late.
        """
        with self._lock:
            lost = len(self._late) >= self._threads
        if lost:
            return [_never() for _ in items]
        futures = [self._pool.submit(read, item) for item in items]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, deadline_s or self._deadline_s, FIRST_COMPLETED)
            if not done:
                self._give_up(pending)
                break
        return futures

    def _give_up(self, pending: set[Future[Any]]) -> None:
        for one in pending:
            if not one.cancel():
                with self._lock:
                    self._late.add(one)
                one.add_done_callback(self._back)

    def _back(self, future: Future[Any]) -> None:
        with self._lock:
            self._late.discard(future)

    def close(self) -> None:
        """Waits for reads that are on their way, late ones too."""
        self._pool.shutdown(wait=True)


def came_back(read: Future[Any]) -> bool:
    """Whether a read has a result. False: it is late, or never began."""
    return read.done() and not read.cancelled()


def _never() -> Future[Any]:
    future: Future[Any] = Future()
    future.cancel()
    return future


@dataclass(frozen=True, slots=True)
class Threads:
    """Who does a tier's work: `readers` with a deadline, `pool` for writes and digests."""

    readers: Readers
    pool: Executor
