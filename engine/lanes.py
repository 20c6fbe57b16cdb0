"""Tier I/O away from the compute thread: one lane that changes tiers, in order, and a few readers.

Results come back by `post`, on the compute thread. A task that raises gives None and a count; the lanes live on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Post = Callable[[Callable[[], object]], None]


class Lanes:
    def __init__(self, post: Post, readers: int = 2) -> None:
        self._post = post
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-write")
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="kv-read")
        self.failures = 0
        self._reading = 0  # reads that were begun and whose `then` has not run

    def write(self, task: Callable[[], T], then: Callable[[T | None], None]) -> None:
        """Run after everything written before it. `then` runs on the compute thread."""
        self._run(self._writer, task, then)

    def read(self, task: Callable[[], T], then: Callable[[T | None], None]) -> None:
        self._reading += 1

        def ended(result: T | None) -> None:
            self._reading -= 1
            then(result)

        self._run(self._readers, task, ended)

    @property
    def idle(self) -> bool:
        """Whether a read that is begun now starts at once."""
        return self._reading == 0

    def after(self, end: Future[Any], then: Callable[[], object]) -> None:
        """`then` runs on the compute thread once `end` is done, however it ended."""
        end.add_done_callback(lambda _: self._post(then))

    def close(self) -> None:
        """Waits for what is under way."""
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)

    def _run(self, pool: ThreadPoolExecutor, task: Callable[[], T], then: Callable[[T | None], None]) -> None:
        def work() -> None:
            try:
                result = task()
            except (
                Exception
            ):  # a failing tier must end neither the lane nor the engine: the pages are missing, that is all
                self._post(self._count_failure)
                self._post(lambda: then(None))
            else:
                self._post(lambda: then(result))

        pool.submit(work)

    def _count_failure(self) -> None:
        self.failures += 1
