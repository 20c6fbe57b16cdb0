"""Our keep-value: what absence would cost, times how soon it would be felt, per byte."""

from __future__ import annotations

import math
from typing import Protocol

from kvtier.policy.index import keep_rate
from kvtier.policy.survival import EDGES, Array, Durations, Survival, bin_of
from kvtier.policy.values import Place, Reason, SessionView, State, View

PAUSES = (State.TOOL, State.APPROVAL, State.PAUSED)
FEW = 8
"""Ended calls below which a tool's own history says nothing and that of all tools is used."""
NEVER = 1e-12
NO_HISTORY = Survival.from_hazard(1 / EDGES[1:])


class Returns(Protocol):
    """How soon sessions come back: the only thing in which a prophet differs from us."""

    def learn(self, view: View) -> None: ...

    def rate(self, session: SessionView, view: View) -> float:
        """Per second: `kvtier.policy.index.keep_rate` of what is left of the pause."""


class TierKeep:
    """Seconds saved per byte and second held: `saving * rate / bytes`.

    To minimise, over the places i, E[wait_i(d) * value + bytes * integral of price_i(t) dt + move_i], price_i must be
    the keep-value of the last one that place i still holds (its shadow price); then the place keeps exactly those whose
    keep-value is above it, which is what `Policy` does with this number. `saving` is the next place's cost less this
    one's, in seconds of waiting of everyone who waits, less the move where it is not there yet.
    """

    def __init__(self, returns: Returns) -> None:
        self.returns = returns

    def learn(self, view: View) -> None:
        self.returns.learn(view)

    def worth(self, session: SessionView, place: Place, view: View, start: int, stop: int) -> float:
        size = max(stop - start, 1) * view.bytes_per_token
        return self.saving_s(session, place, view, start, stop) * self._rate(session, view) / size

    def _rate(self, session: SessionView, view: View) -> float:
        if session.state is State.WAITING:
            return 1 / max(view.wait_s(session), 1e-3)
        if session.state is State.RUNNING:
            return 1 / max(view.wait_s(session), 1.0)
        return self.returns.rate(session, view)

    def saving_s(self, session: SessionView, place: Place, view: View, start: int, stop: int) -> float:
        if place is Place.DEVICE:
            return view.absent_s(session)
        tokens = stop - start
        if session.state is State.RUNNING or session.resident:
            return view.write_s(tokens, place)  # a second copy: it saves being written again, no more
        below = view.below(place)
        there_s = view.compute_s(start, stop) if below is None else view.stream_s(tokens, below)
        move_s = 0.0 if session.copy is place else view.write_s(tokens, place)
        return max(there_s - view.stream_s(tokens, place) - move_s, NEVER)


class Expected:
    """Learned online, per tool, censored by what still runs.

    No history of the tool: that of all tools. None at all: the timeout is the only bound. No timeout either: a hazard
    of 1/t, under which who waited longest is expected last, as LRU has it.
    """

    def __init__(self) -> None:
        self._tools: dict[str, Durations] = {}
        self._all = Durations()
        self._rates: dict[tuple[str, float | None, int], Array] = {}
        self._survivals: dict[tuple[str, float | None], Survival] = {}
        self._seen_at: dict[str, int] = {}
        self._since_s = math.inf

    def learn(self, view: View) -> None:
        self._since_s = min(self._since_s, view.now_s)
        if view.reason is not Reason.TOOL_ENDED:
            return
        session = view.sessions[view.subject]
        span = self._span(session, view)
        durations = self._tools.setdefault(session.tool, Durations())
        durations.add(*span)
        self._all.add(*span)
        seen = self._seen_at.get(session.tool, 0)
        if durations.ended >= seen + 1 + seen // 10:
            self._seen_at[session.tool] = durations.ended
            self._rates.clear()
            self._survivals.clear()

    def ended(self, tool: str) -> int:
        """Calls of this tool whose end was seen."""
        durations = self._tools.get(tool)
        return durations.ended if durations is not None else 0

    def survival(self, tool: str, timeout_s: float | None, view: View) -> Survival:
        """Of the tool's whole duration, from all that is known in this view."""
        if not self._all.ended:
            return NO_HISTORY if timeout_s is None else Survival.point(timeout_s)
        running = [s for s in view.sessions.values() if s.state in PAUSES]
        hazard = self._all.hazard(self._span(s, view) for s in running)
        own = self._tools.get(tool)
        if own is not None and own.ended >= FEW:
            hazard = own.hazard((self._span(s, view) for s in running if s.tool == tool), prior=hazard)
        return Survival.from_hazard(hazard).capped(timeout_s)

    def _span(self, session: SessionView, view: View) -> tuple[float, float]:
        return view.now_s - session.since_s, max(0.0, self._since_s - session.since_s)

    def rate(self, session: SessionView, view: View) -> float:
        octave = int(max(view.wait_s(session), 1e-3) * 1000).bit_length()
        key = (session.tool, session.timeout_s, octave)
        if key not in self._rates:
            wait_s = (1 << octave) / 1500
            whose = (session.tool, session.timeout_s)
            if whose not in self._survivals:
                self._survivals[whose] = self.survival(*whose, view)
            self._rates[key] = keep_rate(self._survivals[whose], wait_s)
        return float(self._rates[key][bin_of(view.now_s - session.since_s)])
