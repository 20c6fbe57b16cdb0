"""Sandboxes that are ready before they are asked for, as many as a cold-start budget needs.

A claim takes a spare, or starts a sandbox while its caller waits: a miss. How many spares there are follows from how
often sandboxes are claimed, how long one takes to start, and how often a claim may miss. Where a start fits the budget
by itself, none is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol, Self

from .budget import MOST_SPARES, Budget, Figures, spares
from .driver import Driver, Sandbox
from .errors import SandboxLost
from .spec import Handle, Limits, SandboxSpec

log = logging.getLogger(__name__)

REFILLERS = 2  # more of them and each start takes longer, with nothing gained
QUIET_S, LONGEST_QUIET_S = 0.05, 0.25  # a start costs what a claim in the same moment needs
WINDOW_S, BURST_S = 60.0, 5.0
STARTS_KEPT = 32
SHAPES_KEPT = 4
RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
ANSWER_S = 2.0
NOBODY = "pool"


class Book(Protocol):
    """Where spares are written down, so that the reapers of other processes know them. `announce` comes before the
    sandbox exists, `withdraw` after it is gone; both may be repeated."""

    async def announce(self, sandbox_id: str) -> None: ...

    async def withdraw(self, sandbox_id: str) -> None: ...


class NoBook:
    """For a process that is alone with its sandboxes."""

    async def announce(self, sandbox_id: str) -> None:
        pass

    async def withdraw(self, sandbox_id: str) -> None:
        pass


@dataclass
class _Shelf:
    """Spares of one shape. `pattern` has the shape; its ids and owners mean nothing."""

    pattern: SandboxSpec
    least: int
    ready: deque[tuple[Handle, Sandbox]] = field(default_factory=deque)
    starting: int = 0
    failures: int = 0  # since the last start that did not fail
    again_at: float = -math.inf
    asked: deque[float] = field(default_factory=lambda: deque(maxlen=4096))

    def rate_hz(self, now: float) -> float:
        while self.asked and now - self.asked[0] > WINDOW_S:
            self.asked.popleft()
        recent = sum(1 for when in self.asked if now - when <= BURST_S)
        return max(len(self.asked) / WINDOW_S, recent / BURST_S)

    def failed(self, now: float) -> None:
        self.again_at = now + min(RETRY_S * 2.0**self.failures, LONGEST_RETRY_S)
        self.failures = min(self.failures + 1, 16)

    def can_have(self, now: float) -> int:
        """How many spares it is worth making room for: what cannot be started is not in the way of other shapes."""
        return len(self.ready) + self.starting + (now >= self.again_at) if self.failures else MOST_SPARES


class Pool:
    """`async with Pool(driver, pattern) as pool`; closing it releases every spare.

    `pattern` is what most claims look like: its limits and volumes; one of its kind is ready before anybody asked.
    Other shapes are kept ready while they are asked for. Sandboxes with a writable volume are always started for their
    session: what they write there belongs to the session's own uid.
    """

    def __init__(
        self,
        driver: Driver,
        pattern: SandboxSpec,
        budget: Budget | None = None,
        book: Book | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.driver = driver
        self.budget = budget or Budget()
        self._book = book or NoBook()
        self._clock = clock
        self._shelves: dict[object, _Shelf] = {_shape(pattern): _Shelf(pattern, 1)}
        self._starts: deque[float] = deque(maxlen=STARTS_KEPT)
        self._claims = self._misses = self._late = 0
        self._failure: str | None = None
        self._last_claim = -math.inf
        self._closing = False
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._refill_forever()) for _ in range(REFILLERS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Releases every spare; claims start their own sandbox from now on.

        Waits for starts that have begun: what is half started cannot be called back, and would be left behind.
        """
        self._closing = True
        self._changed.set()
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks, return_exceptions=True)
        left = [spare for shelf in self._shelves.values() for spare in shelf.ready]
        for shelf in self._shelves.values():
            shelf.ready.clear()
        await asyncio.gather(*(self._discard(*spare) for spare in left), *self._leaving)

    async def claim(self, spec: SandboxSpec) -> tuple[Handle, Sandbox, bool]:
        """A sandbox for `spec`: its handle, a connection to it, and whether it was ready. Raises CreateFailed."""
        spare = await self.take(spec)
        return (*spare, True) if spare is not None else (*await self.start(spec), False)

    async def take(self, spec: SandboxSpec) -> tuple[Handle, Sandbox] | None:
        """A spare, if one is ready. It keeps its own id, and stays in the book until its new owner, who has written it
        down, takes it out there."""
        now = self._clock()
        self._claims += 1
        shelf = None if self._closing else self._shelf(spec, now)
        if shelf is None:
            return None
        self._last_claim = now
        self._changed.set()  # the refillers wake when this waits
        while shelf.ready:
            handle, sandbox = shelf.ready.popleft()
            taken = await _taken(handle, sandbox, spec)
            if taken is not None:
                return taken
            # Not while somebody waits: an engine that hangs takes its time over it.
            leaving = asyncio.create_task(self._discard(handle, sandbox))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            self._changed.set()
        return None

    async def start(self, spec: SandboxSpec) -> tuple[Handle, Sandbox]:
        """A sandbox with the spec's own id, while its caller waits: a miss. Raises CreateFailed."""
        begun = self._clock()
        self._misses += 1
        try:
            return await self._create(spec)
        finally:
            self._late += self._clock() - begun > self.budget.cold_start_s

    def figures(self) -> Figures:
        shelves = self._shelves.values()
        return Figures(
            budget=self.budget,
            ready=sum(len(shelf.ready) for shelf in shelves),
            starting=sum(shelf.starting for shelf in shelves),
            wanted=sum(self._wanted().values()),
            claims=self._claims,
            misses=self._misses,
            late=self._late,
            start_s=self._start_s(),
            failure=self._failure,
        )

    def spares(self) -> set[str]:
        """Ids of the sandboxes that are ready."""
        return {handle.sandbox_id for shelf in self._shelves.values() for handle, _ in shelf.ready}

    def _shelf(self, spec: SandboxSpec, now: float) -> _Shelf | None:
        if self.budget.most == 0 or any(not volume.read_only for volume in spec.volumes):
            return None
        shape = _shape(spec)
        shelf = self._shelves.pop(shape, None) or _Shelf(spec, 0)
        self._shelves[shape] = shelf  # the last one asked for is the last in the order
        shelf.asked.append(now)
        return shelf

    def _start_s(self) -> float | None:
        starts = sorted(self._starts)
        return starts[min(len(starts) - 1, len(starts) * 9 // 10)] if starts else None

    def _wanted(self) -> dict[object, int]:
        """Spares by shape. Those asked for last come first where there is not room for all."""
        start_s, now, room = self._start_s(), self._clock(), self.budget.most
        wanted = {}
        for shape, shelf in reversed(list(self._shelves.items())):
            if start_s is None:  # the first start shows what one takes
                count = shelf.least
            elif start_s <= self.budget.cold_start_s:
                count = 0
            elif rate := shelf.rate_hz(now):
                count = max(shelf.least, spares(rate, start_s, self.budget.miss))
            else:
                count = shelf.least
            wanted[shape] = min(count, room, shelf.can_have(now))
            room -= wanted[shape]
        return wanted

    def _missing(self) -> _Shelf | None:
        wanted = self._wanted()
        for shape in wanted:
            shelf = self._shelves[shape]
            if len(shelf.ready) + shelf.starting < wanted[shape]:
                return shelf
        return None

    async def _refill_forever(self) -> None:
        while not self._closing:
            self._changed.clear()
            shelf = self._missing()
            if shelf is None:
                await self._trim()
                rests = [each.again_at - self._clock() for each in self._shelves.values() if each.failures]
                await self._pause(min([BURST_S, *(rest for rest in rests if rest > 0)]))
            else:
                await self._refill(shelf)

    async def _refill(self, shelf: _Shelf) -> None:
        shelf.starting += 1  # before the first await, or the other refiller starts it too
        try:
            await self._quiet()
            shelf.ready.append(await self._start(shelf.pattern))
            shelf.failures = 0
        except Exception as error:  # also the book's, whatever it is kept in: nobody else would ever refill
            shelf.failed(self._clock())
            self._failure = str(error)
            log.warning("no spare sandbox can be started: %s", error)
        finally:
            shelf.starting -= 1

    async def _pause(self, most_s: float) -> None:
        """Until something has changed, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._changed.wait()

    async def _quiet(self) -> None:
        """Until no claim has come for a moment; under a stream of them, not for long."""
        until = self._clock() + LONGEST_QUIET_S
        while (now := self._clock()) < min(until, self._last_claim + QUIET_S):
            await asyncio.sleep(min(until, self._last_claim + QUIET_S) - now)

    async def _start(self, pattern: SandboxSpec) -> tuple[Handle, Sandbox]:
        sandbox_id = f"sp-{secrets.token_hex(8)}"
        spec = replace(pattern, sandbox_id=sandbox_id, session_id=sandbox_id, tenant_id=NOBODY, epoch=0)
        await self._book.announce(sandbox_id)
        try:
            # It stays connected: an agent without a controller ends by itself, and a claim need not connect.
            return await self._create(spec)
        except BaseException:
            await self._book.withdraw(sandbox_id)
            raise

    async def _create(self, spec: SandboxSpec) -> tuple[Handle, Sandbox]:
        begun = self._clock()
        handle = await self.driver.create(spec)
        try:
            sandbox = await self.driver.attach(handle)
        except BaseException:
            await self.driver.release(handle)
            raise
        self._starts.append(self._clock() - begun)
        self._failure = None
        return handle, sandbox

    async def _trim(self) -> None:
        """Spares that are no longer wanted, and shapes that nobody asks for."""
        wanted = self._wanted()
        for shape, shelf in list(self._shelves.items()):
            while len(shelf.ready) > wanted[shape]:
                await self._discard(*shelf.ready.popleft())
        idle = [shape for shape, shelf in self._shelves.items() if not (shelf.least or shelf.ready or shelf.starting)]
        for shape in idle[: max(0, len(self._shelves) - SHAPES_KEPT)]:
            del self._shelves[shape]

    async def _discard(self, handle: Handle, sandbox: Sandbox) -> None:
        await sandbox.close()
        try:
            await self.driver.release(handle)
            await self._book.withdraw(handle.sandbox_id)
        except Exception as error:  # also the book's
            log.warning("the spare %s is left to the reaper: %s", handle.sandbox_id, error)


async def _taken(handle: Handle, sandbox: Sandbox, spec: SandboxSpec) -> tuple[Handle, Sandbox] | None:
    """The spare in its new owner's name, its old epoch fenced off; None where it does not answer any more."""
    extra = {**handle.extra, **spec.labels, "tenant": spec.tenant_id}
    claimed = replace(
        handle, session_id=spec.session_id, epoch=spec.epoch, limits=spec.limits, extra=MappingProxyType(extra)
    )
    try:
        return claimed, await sandbox.handed_to(claimed, ANSWER_S)
    except (SandboxLost, OSError):
        return None


def _shape(spec: SandboxSpec) -> object:
    """What cannot be changed after the start; the rest is said with every call."""
    whole = Limits()
    limits = replace(spec.limits, output_bytes=whole.output_bytes, call_timeout_s=whole.call_timeout_s)
    return limits, spec.volumes, spec.image
