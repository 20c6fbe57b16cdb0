"""Who runs in the next step. Pure policy: no torch, no clock, no I/O.

Admission reserves every page that a request may ever need, so an admitted request always ends: no set of waiting
requests can hold what another of them waits for. Order is arrival, with a head start for sessions that come back from
a tool; the head start is finite, so at most RETURN_HEAD_START later arrivals overtake anyone.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.facts import PAGE_SIZE
from engine.request import Phase, Request

RETURN_HEAD_START = 8


@dataclass(frozen=True)
class Budget:
    """Per step, in page tiles of 16 tokens. A decoding request takes one tile. Prefill gets the second figure when
    nobody is decoding, the first when someone is, so that a long prompt does not stall the others' streams."""

    prefill_tiles_beside_decode: int = 4
    prefill_tiles_alone: int = 16
    running: int = 32


@dataclass(frozen=True)
class Work:
    """Run tokens start..start+count of a request; the last of them is sampled from when nothing is pending after it."""

    request: Request
    start: int
    count: int
    samples: bool


@dataclass(frozen=True)
class Plan:
    """One step. `unpin_pages`: pages that pins must give back before the first waiting request can ever run."""

    admit: tuple[Request, ...]
    work: tuple[Work, ...]
    unpin_pages: int = 0

    @property
    def idle(self) -> bool:
        return not (self.admit or self.work or self.unpin_pages)


class Scheduler:
    """Not thread-safe: one thread schedules."""

    def __init__(self, pool_pages: int, budget: Budget = Budget()) -> None:
        self._pool_pages = pool_pages
        self._budget = budget
        self._waiting: list[Request] = []
        self._admitted: list[Request] = []
        self._arrivals = 0

    @property
    def reserved_pages(self) -> int:
        return sum(request.pages_needed for request in self._admitted)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        return len(self._admitted)

    def requests(self) -> list[Request]:
        return [*self._admitted, *self._waiting]

    def add(self, request: Request) -> None:
        self._arrivals += 1
        request.arrival = self._arrivals - (RETURN_HEAD_START if request.spec.known_tokens else 0)
        self._waiting.append(request)
        self._waiting.sort(key=lambda r: r.arrival)

    def remove(self, request: Request) -> None:
        """Take out a request that has ended, whatever its phase; its reservation ends with it."""
        request.phase = Phase.ENDED
        self._waiting = [r for r in self._waiting if r is not request]
        self._admitted = [r for r in self._admitted if r is not request]

    def schedule(self, pinned_pages: int = 0) -> Plan:
        """The next step. Admitted requests are in phase restoring; the caller moves them to running."""
        admit, unpin = self._admit(pinned_pages)
        running = [r for r in self._admitted if r.phase is Phase.RUNNING]
        decode = [Work(r, r.computed, 1, True) for r in running if r.decoding]
        budget = self._budget
        tiles = budget.prefill_tiles_beside_decode if decode else budget.prefill_tiles_alone
        work = [*decode]
        for request in running:
            if request.decoding or tiles <= 0:
                continue
            piece = _chunk(request, tiles)
            tiles -= _tiles(piece)
            work.append(piece)
        return Plan(tuple(admit), tuple(work), unpin)

    def _admit(self, pinned_pages: int) -> tuple[list[Request], int]:
        admitted: list[Request] = []
        while self._waiting and len(self._admitted) < self._budget.running:
            head = self._waiting[0]
            room = self._pool_pages - self.reserved_pages - pinned_pages
            if head.pages_needed > room:
                short = head.pages_needed - room
                return admitted, (short if not self._admitted and pinned_pages else 0)
            self._waiting.pop(0)
            head.phase = Phase.RESTORING
            self._admitted.append(head)
            admitted.append(head)
        return admitted, 0


def _chunk(request: Request, tiles: int) -> Work:
    """The next tokens, up to a page boundary `tiles` pages on."""
    end = min(len(request.tokens), (request.computed // PAGE_SIZE + tiles) * PAGE_SIZE)
    return Work(request, request.computed, end - request.computed, end == len(request.tokens))


def _tiles(work: Work) -> int:
    return (work.start + work.count - 1) // PAGE_SIZE - work.start // PAGE_SIZE + 1
