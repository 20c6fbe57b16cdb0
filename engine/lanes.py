"""Tier I/O away from the compute thread: a lane that changes the tiers of this machine, in order, one for the store
that machines share, and a few readers.

Results come back by `post`, on the compute thread. A task that raises gives None and a count; the lanes live on. So
does one that never ends: a lane that has ended nothing for its deadline is stuck, what waits in it is answered with
None, and so is at once what comes until it moves again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Post = Callable[[Callable[[], object]], None]

DEADLINE_S = 30.0
SHARED_DEADLINE_S = 120.0  # a network in between


@dataclass(eq=False)
class _Task:
    then: Callable[[Any], None]
    answered: bool = False

    def answer(self, result: Any) -> None:
        if not self.answered:
            self.answered = True
            self.then(result)


@dataclass(eq=False)
class _Lane:
    """`moved_s`: when it last ended a task, or began to have one. Books are kept on the compute thread."""

    pool: ThreadPoolExecutor
    deadline_s: float
    tasks: list[_Task] = field(default_factory=list)
    moved_s: float = 0.0
    stuck: bool = False


class Lanes:
    """`write` and `read` are called on the compute thread. `clock` as the core's."""

    def __init__(
        self,
        post: Post,
        readers: int = 2,
        clock: Callable[[], float] = time.monotonic,
        deadlines_s: tuple[float, float] = (DEADLINE_S, SHARED_DEADLINE_S),
    ) -> None:
        self._post = post
        self._clock = clock
        self._writer, self._sharer = (
            _Lane(ThreadPoolExecutor(1, thread_name_prefix=name), deadline_s)
            for name, deadline_s in zip(("kv-write", "kv-share"), deadlines_s, strict=True)
        )
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="kv-read")
        self.failures = 0
        self.overdue_writes = 0  # answered with None because their lane was stuck
        self._reading = 0  # reads that were begun and whose `then` has not run

    def write(self, task: Callable[[], T], then: Callable[[T | None], None], *, shared: bool = False) -> None:
        """Run after everything written before it in this lane. `then` runs on the compute thread, once."""
        lane = self._sharer if shared else self._writer
        waiting = _Task(then)
        if lane.stuck:
            self.overdue_writes += 1
            self._post(lambda: waiting.answer(None))
            return
        if not lane.tasks:
            lane.moved_s = self._clock()
        lane.tasks.append(waiting)

        def ended(result: T | None) -> None:
            lane.tasks.remove(waiting)
            lane.moved_s, lane.stuck = self._clock(), False
            waiting.answer(result)

        self._run(lane.pool, task, ended)

    def overdue(self, now: float) -> float | None:
        """A timer of the core: answers what waits in a lane that is stuck. Seconds until the next can be."""
        dues = []
        for lane in (self._writer, self._sharer):
            if not lane.tasks or lane.stuck:
                continue
            due_s = lane.moved_s + lane.deadline_s - now
            if due_s > 0:
                dues.append(due_s)
                continue
            lane.stuck = True
            self.overdue_writes += len(lane.tasks)
            for task in list(lane.tasks):
                task.answer(None)
        return min(dues) if dues else None

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
        for pool in (self._writer.pool, self._sharer.pool, self._readers):
            pool.shutdown(wait=True)

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
