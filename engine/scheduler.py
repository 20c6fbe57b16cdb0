"""Who runs in the next step. Pure policy: no torch, no clock, no I/O.

A request is admitted when the pages of the tokens that it has are there; it grows a page at a time from then on. What
the admitted ones are still owed for the tokens they have never exceeds what the pool can give: when it would, pins
give way first, then the request that arrived last goes back to the queue with its pages in the host tier. The oldest
admitted request is never sent back and fits the pool alone, so someone always ends and nobody waits for ever.

    pool   |<- held by requests ->|<- pins ->|<----------- available (free and cached) ----------->|
                                             |<- owed to admitted ->|<- growth ->|<-- the next one ->|

Order of admission: the tenant that was served least; within it those that were sent back, then sessions that return
from a tool, then the rest, each by the tokens that are left to compute (Schrage 1968: the least mean wait; who lost its
pages delays nobody but itself), then in order of arrival. Whoever was overtaken OVERTAKEN_AT_MOST times by later
arrivals goes before all of these. Prefill is shared out in the same order, but who had none for PASSED_OVER_AT_MOST
steps goes first within its tenant only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engine.facts import PAGE_SIZE
from engine.fairness import Fairness
from engine.pace import Pace
from engine.pages import PagePool
from engine.request import Phase, Request

OVERTAKEN_AT_MOST = 16
PASSED_OVER_AT_MOST = 16


@dataclass(frozen=True)
class Budget:
    """Tokens of prefill in one step: `prefill_alone` when nobody decodes. Beside requests that decode, so many that a
    step takes `stretch` longer than without them; the first figure while that is not known, and always with `stretch`
    0. `running`: most requests admitted at once.
    """

    prefill_beside_decode: int = 16
    prefill_alone: int = 256
    running: int = 32
    stretch: float = 0.75


@dataclass(frozen=True)
class Work:
    """Run tokens start..start+count of a request; the last of them is sampled from when nothing is pending after it."""

    request: Request
    start: int
    count: int
    samples: bool

    @property
    def is_decode(self) -> bool:
        return self.samples and self.count == 1


@dataclass(frozen=True)
class Plan:
    """One step. With `unpin_pages` or `preempt` there is nothing else in it: that comes first, then a new plan.

    unpin_pages: pages that pins must give back
    preempt:     the request that must give its pages back and wait
    """

    admit: tuple[Request, ...] = ()
    work: tuple[Work, ...] = ()
    unpin_pages: int = 0
    preempt: Request | None = None

    @cached_property
    def decoding(self) -> int:
        """Requests that run one token."""
        return sum(work.is_decode for work in self.work)

    @cached_property
    def prefill(self) -> int:
        """Tokens of the others."""
        return sum(work.count for work in self.work if not work.is_decode)


class Scheduler:
    """Not thread-safe: one thread schedules."""

    def __init__(self, pool: PagePool, budget: Budget = Budget()) -> None:
        self._pool = pool
        self._budget = budget
        self._waiting: list[Request] = []
        self._admitted: list[Request] = []
        self._fairness = Fairness()
        self._pace = Pace(budget.prefill_beside_decode, budget.prefill_alone, budget.stretch)
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        return len(self._admitted)

    @property
    def most_running(self) -> int:
        """How many requests are admitted at once at most."""
        return self._budget.running

    @property
    def owed_pages(self) -> int:
        """Pages that admitted requests do not hold yet and need for the tokens that they have."""
        return sum(map(self._owed, self._admitted))

    @property
    def spare_pages(self) -> int:
        """Pages that could be pinned, or filled ahead of need, without taking anything from admitted requests."""
        return max(0, self._pool.available - self.owed_pages - self.admitted)

    def requests(self) -> list[Request]:
        return [*self._admitted, *self._waiting]

    def add(self, request: Request) -> None:
        self._arrivals += 1
        request.arrival = self._arrivals
        self._waiting.append(request)
        self._fairness.enter(request.spec.salt)

    def remove(self, request: Request) -> None:
        """Take out a request that has ended, whatever its phase."""
        request.phase = Phase.ENDED
        if _take(self._waiting, request) or _take(self._admitted, request):
            self._fairness.leave(request.spec.salt)

    def send_back(self, request: Request) -> None:
        """Let an admitted request wait again; its pages are no longer its own."""
        _take(self._admitted, request)
        request.phase = Phase.PREEMPTED
        self._waiting.append(request)

    def schedule(self, pinned_pages: int = 0) -> Plan:
        """The next step. Admitted requests are in phase restoring; the caller moves them to running."""
        short = self.owed_pages - self._pool.available
        if short > 0:
            if pinned_pages:
                return Plan(unpin_pages=short)
            return Plan(preempt=max(self._admitted, key=lambda r: r.arrival))
        admit, unpin = self._admit(pinned_pages)
        if unpin:
            return Plan(unpin_pages=unpin)
        return Plan(tuple(admit), tuple(self._work()))

    def served(self, request: Request, tokens: int) -> None:
        """Tokens of a request were computed outside a plan."""
        self._fairness.serve(request.spec.salt, tokens)

    def measured(self, plan: Plan, step_s: float) -> None:
        """A plan's work took `step_s` seconds. Decides how much prefill comes beside decoding from here on."""
        if self._budget.stretch:
            self._pace.observe(plan.decoding, plan.prefill, step_s)

    # -- admission ------------------------------------------------------------------------------------------------

    def _admit(self, pinned_pages: int) -> tuple[list[Request], int]:
        """Requests to admit; or, with nobody admitted and pins in the way of the first, pages to unpin."""
        admitted: list[Request] = []
        room = self._pool.available - self.owed_pages
        while self._waiting and len(self._admitted) < self._budget.running:
            head = self._first_waiting()
            need = self._need(head)
            growth = len(self._admitted)  # a page each, or the next token would send someone back
            if need > room - growth:
                return admitted, (need - room if not self._admitted and pinned_pages else 0)
            room -= need
            self._overtake(head)
            _take(self._waiting, head)
            head.phase = Phase.RESTORING
            self._admitted.append(head)
            admitted.append(head)
        return admitted, 0

    def _first_waiting(self) -> Request:
        overdue = [r for r in self._waiting if r.overtaken >= OVERTAKEN_AT_MOST]
        if overdue:
            return min(overdue, key=lambda r: r.arrival)
        return min(self._waiting, key=lambda r: (self._fairness.served(r.spec.salt), _rank(r)))

    def _overtake(self, head: Request) -> None:
        for request in self._waiting:
            request.overtaken += request.arrival < head.arrival

    def _need(self, request: Request) -> int:
        """Pages that admission takes out of the available ones: those of its tokens but for pages that others hold
        already, and one for the copy of a shared page."""
        shared = sum(self._pool.is_held(key) for key in request.known_keys())
        return _pages(len(request.tokens)) + 1 - shared

    def _owed(self, request: Request) -> int:
        if request.phase is Phase.RESTORING:
            return max(0, _pages(len(request.tokens)) + 1 - request.claimed_pages)
        growth = max(0, _pages(len(request.tokens)) - len(request.blocks))
        return growth + request.writes_shared(self._pool)

    # -- work -----------------------------------------------------------------------------------------------------

    def _work(self) -> list[Work]:
        running = [r for r in self._admitted if r.phase is Phase.RUNNING]
        work = [Work(r, r.computed, 1, True) for r in running if r.pending == 1]
        tokens = self._pace.tokens(len(work))
        for request in sorted((r for r in running if r.pending > 1), key=self._prefill_rank):
            if tokens <= 0:
                request.passed_over += 1
                continue
            piece = _chunk(request, tokens)
            tokens -= piece.count
            request.passed_over = 0
            work.append(piece)
        for piece in work:
            self._fairness.serve(piece.request.spec.salt, piece.count)
        return work

    def _prefill_rank(self, request: Request) -> tuple[int, int, int, int]:
        """The tenant that was served least; within it those that were passed over, those that return, the rest, who has
        least left first."""
        overdue = request.passed_over >= PASSED_OVER_AT_MOST
        rank = 0 if overdue else 1 if request.returning else 2
        return self._fairness.served(request.spec.salt), rank, request.pending, request.arrival


def _rank(request: Request) -> tuple[int, int, int]:
    if request.phase is Phase.PREEMPTED:
        return 0, 0, request.arrival
    return (1 if request.returning else 2), request.left, request.arrival


def _chunk(request: Request, tokens: int) -> Work:
    """The next `tokens` tokens; a longer rest is cut at a page's end where one can be reached."""
    end = min(len(request.tokens), request.computed + tokens)
    aligned = end // PAGE_SIZE * PAGE_SIZE
    if end < len(request.tokens) and aligned > request.computed:
        end = aligned
    return Work(request, request.computed, end - request.computed, end == len(request.tokens))


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def _take(requests: list[Request], request: Request) -> bool:
    """Remove by identity."""
    for index, candidate in enumerate(requests):
        if candidate is request:
            del requests[index]
            return True
    return False
