"""What runs on a node, and how it stops: no step begins any more, those that run end or are handed over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from workflows.contract import ErrorType


class Leaving:
    """Counts the steps of a node. A step that is handed over goes on elsewhere after its last durable token."""

    def __init__(self) -> None:
        self.began = False
        self._running: dict[asyncio.Task[Any], str] = {}
        self._handed_over: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> set[str]:
        """Sessions whose step runs here."""
        return set(self._running.values())

    async def step(self, session_id: str, work: Callable[[], Awaitable[Any]]) -> Any:
        if self.began:
            raise _moves_on()
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = session_id
        self._idle.clear()
        try:
            return await work()
        except asyncio.CancelledError:
            if task in self._handed_over:
                raise _moves_on() from None
            raise
        finally:
            del self._running[task]
            self._handed_over.discard(task)
            if not self._running:
                self._idle.set()

    async def empty(self, deadline_s: float, patience_s: float) -> int:
        """Returns when no step runs here: after `deadline_s` those that still do are handed over, for which they get
        `patience_s`. How many those were."""
        self.began = True
        if await self._is_idle(deadline_s):
            return 0
        late = set(self._running)
        self._handed_over |= late
        for task in late:
            task.cancel()
        await self._is_idle(patience_s)
        return len(late)

    async def _is_idle(self, within_s: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), within_s)
        except TimeoutError:
            return False
        return True


class Watched(Interceptor):
    """Puts every step of a node's own queue under `leaving`, and tells of each that completed."""

    def __init__(self, leaving: Leaving, completed: Callable[[str, Any], Coroutine[Any, Any, None]]) -> None:
        self._leaving, self._completed = leaving, completed
        self._telling: set[asyncio.Task[None]] = set()

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Watch(next, self)

    async def run(self, what: Any, work: Callable[[], Awaitable[Any]]) -> Any:
        result = await self._leaving.step(what.session_id, work)
        telling = asyncio.create_task(self._completed(activity.info().activity_type, what))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        return result


class _Watch(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, watched: Watched) -> None:
        super().__init__(next)
        self._watched = watched

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        return await self._watched.run(input.args[0], lambda: self.next.execute_activity(input))


def _moves_on() -> ApplicationError:
    return ApplicationError("the node is draining", type=ErrorType.DRAINING)
