"""Published rules as keep-values in the same mechanism, with the same tiers, links and write-behind as ours.

That is kinder to most of them than their own systems are: where a paper frees, here a tier still holds it until the
tier is full. C is context in tokens, M bytes per token, d the tool's time, R(C) the prefill of C in seconds.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections import defaultdict, deque

import numpy as np

from bench.policy_load import Tool
from kvtier.policy import Expected, Move, Place, Policy, Reason, SessionView, State, Survival, TierKeep, View
from kvtier.policy.keep import PAUSES
from kvtier.policy.survival import EDGES

PINNED = 1e12
"""Above any time of last use: what is pinned goes last."""


def first_come(session: SessionView, left_s: float) -> float:
    return session.since_s


def by_program(session: SessionView, left_s: float) -> float:
    """What is still held somewhere first; then by program, in the order in which they began."""
    return session.born_s + (0.0 if session.resident or session.copy is not None else 1e9)


def pinned_first(session: SessionView, left_s: float) -> float:
    """Continuum's: what the device still holds first; then by program."""
    return session.born_s + (0.0 if session.resident else 1e9)


def shortest_first(session: SessionView, left_s: float) -> float:
    """ThunderAgent's: restore by 1/C + [reasoning]."""
    return session.tokens


def least_left(session: SessionView, left_s: float) -> float:
    """Ours: `kvtier.policy.order`."""
    return left_s


class Lru:
    """Least recently used goes first; the same in every place."""

    def learn(self, view: View) -> None:
        pass

    def worth(self, session: SessionView, place: Place, view: View, start: int, stop: int) -> float:
        return view.now_s if session.state is State.RUNNING else session.since_s


class Ttl(Lru):
    """Pinned on the device for a time after the tool starts; the first to run out goes first when all are pinned."""

    def __init__(self, ttl_s: float = 60.0) -> None:
        self.ttl_s = ttl_s

    def pin_s(self, session: SessionView, view: View) -> float:
        return self.ttl_s

    def worth(self, session: SessionView, place: Place, view: View, start: int, stop: int) -> float:
        if place is not Place.DEVICE or session.state not in PAUSES:
            return super().worth(session, place, view, start, stop)
        ends_s = session.since_s + self.pin_s(session, view)
        return PINNED + ends_s if ends_s > view.now_s else session.since_s


class Continuum(Ttl):
    """Continuum (arXiv 2511.02230, sections 4.1 and 4.2, as a third-party port cites them).

    t* = argmax over t in {0} and the observed d of P(d <= t) * (Q * eta + R(C)) - t, Q the mean wait for the device,
    eta = -Corr(k, N - k) over past programs (k turns done of N). Until a hundred calls are known, a constant; until a
    hundred of the tool, the calls of all tools. Pinned programs first, then the program that came first.
    """

    HISTORY = 100

    def __init__(self, eta: float = 1.0) -> None:
        super().__init__(2.0)
        self.eta = eta
        self._calls: dict[str, list[float]] = defaultdict(list)
        self._all: list[float] = []
        self._waits: deque[float] = deque(maxlen=200)
        self._pins: dict[tuple[str, int], float] = {}

    def learn(self, view: View) -> None:
        session = view.sessions[view.subject]
        if view.reason is Reason.TOOL_STARTED:
            self._pins[session.id, session.turn] = self._best_s(session, view)
        if view.reason is Reason.TOOL_ENDED:
            seconds = view.now_s - session.since_s
            bisect.insort(self._calls[session.tool], seconds)
            bisect.insort(self._all, seconds)
            self._waits.append(view.waiting * view.service_s)
            self._pins.pop((session.id, session.turn), None)

    def pin_s(self, session: SessionView, view: View) -> float:
        return self._pins.get((session.id, session.turn), self.ttl_s)

    def _best_s(self, session: SessionView, view: View) -> float:
        calls = self._calls[session.tool] if len(self._calls[session.tool]) > self.HISTORY else self._all
        if len(self._all) <= self.HISTORY:
            return self.ttl_s
        mean_wait_s = statistics.fmean(self._waits) if self._waits else 0.0
        saving_s = mean_wait_s * self.eta + view.prefill.seconds(session.tokens)
        candidates = ((saving_s * (k + 1) / len(calls) - d, d) for k, d in enumerate(calls))
        best, ttl_s = max(candidates)
        return ttl_s if best > 0 else 0.0


class ContinuumReleased(Continuum):
    """Its code: pin for 2.0 s iff the tool's mean is at most 2.0 s or unknown."""

    def _best_s(self, session: SessionView, view: View) -> float:
        calls = self._calls[session.tool]
        return 2.0 if not calls or statistics.fmean(calls) <= 2.0 else 0.0


class ThunderAgent(Lru):
    """ThunderAgent: pause by 1/C + [acting], the largest first; restore by 1/C + [reasoning], the largest first.

    Its decay of acting programs (2^-t) decides when it pauses; here room is made when room is needed. Within the
    acting, the shortest context goes first, as recomputing costs C^2.
    """

    def worth(self, session: SessionView, place: Place, view: View, start: int, stop: int) -> float:
        return -(1 / max(session.tokens, 1) + (session.state in PAUSES))


class InferCept(Lru):
    """InferCept: the least of the memory wasted by preserving, discarding, swapping; the elapsed time stands for d.

    Preserve: d*C*M. Discard: R(C)*M*(C + C_other). Swap: 2*T_swap(C)*C_batch*M. Who wastes most by being preserved,
    compared with the better of the other two, goes first.
    """

    def worth(self, session: SessionView, place: Place, view: View, start: int, stop: int) -> float:
        if session.state not in PAUSES:
            return super().worth(session, place, view, start, stop) + PINNED
        context = session.tokens
        batch = max(view.by_place[Place.DEVICE].used_bytes / view.bytes_per_token, context)
        preserve = (view.now_s - session.since_s) * context
        discard = view.prefill.seconds(context) * (context + batch)
        if place is Place.DEVICE and len(view.tiers) > 1:
            swap = 2 * view.tiers[1].write_s(view.size(session)) * batch
            discard = min(discard, swap)
        return discard - preserve


class Prophet:
    """Knows when each pause ends: what no policy can."""

    def __init__(self, ends_s: dict[tuple[str, int], float]) -> None:
        self.ends_s = ends_s

    def learn(self, view: View) -> None:
        pass

    def left_s(self, session: SessionView, view: View) -> float:
        return self.ends_s[session.id, session.turn] - view.now_s

    def rate(self, session: SessionView, view: View) -> float:
        return 1 / max(self.left_s(session, view) + view.wait_s(session), 1e-3)


class Informed(Expected):
    """Knows each tool's true distribution from the start: what no amount of learning can better."""

    def __init__(self, tools: tuple[Tool, ...]) -> None:
        super().__init__()
        self._known = {tool.name: tool for tool in tools}

    def survival(self, tool: str, timeout_s: float | None, view: View) -> Survival:
        return self.distribution(tool).capped(timeout_s)

    def distribution(self, tool: str) -> Survival:
        known = self._known[tool]
        scaled = np.log(np.maximum(EDGES, 1e-9) / known.median_s) / (known.sigma * math.sqrt(2))
        return Survival(np.array([math.erfc(x) / 2 for x in scaled]))


class Farthest(TierKeep):
    """Belady's rule: who comes back last goes first, whatever it costs and weighs."""

    def worth(self, session: SessionView, place: Place, view: View, start: int, stop: int) -> float:
        return self._rate(session, view)


class Inverted(TierKeep):
    """Sabotage: the price with its sign turned."""

    def worth(self, session: SessionView, place: Place, view: View, start: int, stop: int) -> float:
        return -super().worth(session, place, view, start, stop)


class Deaf(Policy):
    """Sabotage: bandwidths are what they once were, whatever the view says."""

    def decide(self, view: View) -> list[Move]:
        was = (dataclasses.replace(tier, read_bps=14e9, write_bps=14e9) for tier in view.tiers)
        return super().decide(dataclasses.replace(view, tiers=tuple(was)))


class Eager(Policy):
    """Sabotage: whatever comes back soonest is read to the device before anybody asked for it."""

    def _paused(self, subject: SessionView, view: View) -> list[Move]:
        moves = super()._paused(subject, view)
        away = [s for s in view.sessions.values() if s.copy is not None and not s.resident and s.state in PAUSES]
        away.sort(key=lambda s: self.keep.worth(s, Place.NVME, view, 0, s.tokens), reverse=True)
        return moves + [Move("prefetch", s.id, s.copy, view.size(s), 0.0) for s in away[:2] if s.copy is not None]


class Blind(Expected):
    """Sabotage: no survival; every pause is what its tool takes from the start, however long it has lasted."""

    def rate(self, session: SessionView, view: View) -> float:
        return super().rate(dataclasses.replace(session, since_s=view.now_s), view)
