"""The tiers as they will be after the moves so far."""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import TYPE_CHECKING

from kvtier.policy.values import Move, Place, Reason, SessionView, State, View

if TYPE_CHECKING:
    from kvtier.policy.cascade import Policy


class Plan:
    """Moves being made up for one view; no place ever holds more than it can."""

    def __init__(self, policy: Policy, view: View) -> None:
        self.policy = policy
        self.view = view
        self.moves: list[Move] = []
        self.free = {tier.place: tier.free_bytes for tier in view.tiers}
        self._on_device: set[str] = set()
        self._now: dict[str, SessionView] = {}
        self._ranked: dict[tuple[Place, bool], list[tuple[float, str]]] = {}

    def now(self, session: SessionView) -> SessionView:
        """The session as it is after the moves so far."""
        return self._now.get(session.id, session)

    def whole(self, session: SessionView) -> bool:
        now = self.now(session)
        return now.copy is not None and now.copy_from == 0 and now.copy_to == now.tokens

    def insert(self, session: SessionView, place: Place | None = None) -> bool:
        """Into `place` or, where others are worth more there, further down; False if nowhere."""
        first = place or self.view.below(Place.DEVICE)
        return first is not None and (self._insert_above(session, first) or self._insert_dropping(session, first))

    def _insert_above(self, session: SessionView, place: Place) -> bool:
        """Where nothing is lost: who gives way goes one down."""
        at: Place | None = place
        while at is not None and self.view.below(at) is not None:
            if self.policy.admits(session, at, self.view) and self._put(session, at, dropping=False):
                return True
            at = self.view.below(at)
        return False

    def _insert_dropping(self, session: SessionView, first: Place) -> bool:
        """Where what is lost is worth least."""
        places: list[tuple[float, int, Place]] = []
        at: Place | None = first
        while at is not None:
            if self.policy.admits(session, at, self.view):
                places.append((self._least_worth(at, self.view.size(session)), len(places), at))
            at = self.view.below(at)
        return any(self._put(session, at, dropping=True) for _, _, at in sorted(places))

    def _least_worth(self, place: Place, size: int) -> float:
        """Of what would have to go there first; nothing has to where there is room."""
        ranked = self._rank(place, True)
        return ranked[0][0] if ranked and self.free[place] < size else -math.inf

    def _put(self, session: SessionView, place: Place, dropping: bool) -> bool:
        start = self._make_room(session, place, dropping)
        if start < session.tokens:
            self._store(session, place, start)
        return start < session.tokens

    def leaving(self, session: SessionView) -> SessionView:
        """It leaves the device: what it is worth elsewhere no longer counts on that."""
        self._now[session.id] = gone = dataclasses.replace(self.now(session), resident=False)
        self._on_device.add(session.id)
        return gone

    def evict_device(self, session: SessionView) -> None:
        cost_s = self.view.absent_s(self.now(session))
        self.moves.append(Move("evict", session.id, Place.DEVICE, self.view.size(session), cost_s))
        self._now[session.id] = dataclasses.replace(self.now(session), resident=False)
        self.free[Place.DEVICE] += self.view.size(session)

    def _pieces(self, session: SessionView, dropping: bool) -> list[int]:
        """Where a copy may begin: anywhere, in steps, where something is dropped; at its start where it moves."""
        count = self.policy.pieces if dropping else 1
        least = 0 if session.resident or session.id in self._on_device else session.copy_from
        bounds = [session.tokens * k // count for k in range(count)] + [session.tokens]
        return [least, *(bound for bound in bounds if bound > least)]

    def _make_room(self, session: SessionView, place: Place, dropping: bool) -> int:
        """The token from which on everyone who has to go is worth less than the newcomer.

        What the newcomer already has there counts as free to it. Nothing is displaced for a piece that does not fit.
        """
        bounds = self._pieces(session, dropping)
        free = self.free[place] + self._held(session, place)
        start = session.tokens
        while start > bounds[0]:
            head = bounds[bounds.index(start) - 1]
            size = (start - head) * self.view.bytes_per_token
            if free < size:
                worth = self._worth(session, place, head, start, dropping)
                victims = self._victims(session, place, size - free, worth, dropping)
                if victims is None:
                    break
                free += sum(self._displace(victim, place, cut, dropping) for victim, cut in victims)
            free -= size
            start = head
        return start

    def _victims(
        self, session: SessionView, place: Place, need: int, worth: float, dropping: bool
    ) -> list[tuple[SessionView, int]] | None:
        """Who gives way, and up to which token, to free `need` bytes; None if somebody worth as much would have to."""
        ranked = self._rank(place, dropping)
        taken: list[tuple[float, str]] = []
        cuts: dict[str, int] = {}
        while need > 0 and ranked and ranked[0][0] < worth:
            taken.append(heapq.heappop(ranked))
            name = taken[-1][1]
            other = self.now(self.view.sessions[name])
            if other.copy is not place or name == session.id:
                continue
            begin = cuts.get(name, other.copy_from)
            cuts[name] = cut = self._next_cut(other, begin, dropping)
            need -= (cut - begin) * self.view.bytes_per_token
            if cut < other.copy_to:
                heapq.heappush(ranked, (self._head_worth(other, place, cut, dropping), name))
        if need > 0:
            self._ranked.pop((place, dropping))
            return None
        return [(self.now(self.view.sessions[name]), cut) for name, cut in cuts.items()]

    def _rank(self, place: Place, dropping: bool) -> list[tuple[float, str]]:
        """A heap of the first pieces of all copies in a place."""
        key = (place, dropping)
        if key not in self._ranked:
            here = [self.now(s) for s in self.view.sessions.values() if self.now(s).copy is place and self._may_go(s)]
            self._ranked[key] = [(self._head_worth(s, place, s.copy_from, dropping), s.id) for s in here]
            heapq.heapify(self._ranked[key])
        return self._ranked[key]

    def _next_cut(self, session: SessionView, begin: int, dropping: bool) -> int:
        if not dropping:
            return session.copy_to
        count = self.policy.pieces
        bounds = (session.tokens * k // count for k in range(1, count + 1))
        return min(next((bound for bound in bounds if bound > begin), session.tokens), session.copy_to)

    def _head_worth(self, session: SessionView, place: Place, start: int, dropping: bool) -> float:
        return self._worth(session, place, start, self._next_cut(session, start, dropping), dropping)

    def _worth(self, session: SessionView, place: Place, start: int, stop: int, dropping: bool) -> float:
        at = self.view.tiers[-1].place if dropping else place
        return self.policy.keep.worth(session, at, self.view, start, stop)

    def _may_go(self, session: SessionView) -> bool:
        """Not what is being read back, nor what the pressure is for."""
        reading = session.held and session.state is not State.RUNNING
        return not reading and not (self.view.reason is Reason.PRESSURE and session.id == self.view.subject)

    def _displace(self, victim: SessionView, place: Place, cut: int, dropping: bool) -> int:
        """Down, if someone below is worth less; else its head goes, or all of it. Bytes freed here."""
        below, before = self.view.below(place), self.free[place]
        if not dropping and below is not None and victim.copy_to == victim.tokens and self.insert(victim, below):
            return self.free[place] - before
        if cut < victim.copy_to:
            self._trim(victim, place, cut)
        else:
            self._forget(victim)
        return self.free[place] - before

    def _held(self, session: SessionView, place: Place) -> int:
        now = self.now(session)
        return (now.copy_to - now.copy_from) * self.view.bytes_per_token if now.copy is place else 0

    def _store(self, session: SessionView, place: Place, start: int) -> None:
        now = self.now(session)
        there = max(0, now.copy_to - max(now.copy_from, start)) if now.copy is place else 0
        written = session.tokens - start - there
        if now.copy is not None:
            self.free[now.copy] += self._held(session, now.copy)
        self.free[place] -= (session.tokens - start) * self.view.bytes_per_token
        self._now[session.id] = dataclasses.replace(now, copy=place, copy_from=start, copy_to=session.tokens)
        if now.copy is not place or written or start != now.copy_from:
            size, cost_s = written * self.view.bytes_per_token, self.view.write_s(written, place)
            self.moves.append(Move("store", session.id, place, size, cost_s, start))

    def _trim(self, session: SessionView, place: Place, cut: int) -> None:
        size = (cut - session.copy_from) * self.view.bytes_per_token
        loss_s = self.view.compute_s(session.copy_from, cut)
        self.free[place] += size
        self._now[session.id] = dataclasses.replace(session, copy_from=cut)
        self.moves.append(Move("trim", session.id, place, size, loss_s, cut))

    def _forget(self, session: SessionView) -> None:
        if session.copy is None:
            return
        gone = dataclasses.replace(session, copy=None, copy_from=0, copy_to=0)
        size = self._held(session, session.copy)
        self.free[session.copy] += size
        self._now[session.id] = gone
        loss_s = self.view.absent_s(gone) - self.view.absent_s(session)
        self.moves.append(Move("evict", session.id, session.copy, size, max(loss_s, 0.0)))
