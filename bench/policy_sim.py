"""A device that serves sessions, in simulated seconds.

The device is one server: a chunk of somebody's prefill at a time, then, after a turn's last chunk, its decoding at the
rate that a full batch reaches, as if its share of the batch were done at once. Before each chunk it takes the first, by
the policy's order, of those whose room and bytes are there, but none may be overtaken too often. The first in the queue
get their room and their bytes while the device still serves others.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections.abc import Callable, Iterator

from bench.policy_load import Turn
from bench.policy_machine import Hardware, Outcome, Slot
from bench.policy_tiers import Machine
from kvtier.policy import Move, Place, Policy, Reason, SessionView, State, View, Waiting, first_served, left_s

AHEAD = 4
"""Sessions at the head of the queue that get room and bytes before their turn."""
CHUNK = 256
"""Tokens of prefill in one step of the real engine when nobody decodes."""
Order = Callable[[SessionView, float], float]
"""What the waiting are ranked by, least first: a session, and the seconds of prefill that are left before its token."""


class Simulation(Machine):
    """`warm` first tokens are let pass, `measure` are measured. `ends_s`: when each pause ends, for a prophet."""

    def __init__(
        self,
        hardware: Hardware,
        policy: Policy,
        order: Order,
        warm: int = 0,
        measure: int = 1 << 60,
        ends_s: dict[tuple[str, int], float] | None = None,
    ) -> None:
        super().__init__(hardware, ends_s)
        self.policy = policy
        self.order = order
        self.warm, self.measure = warm, measure
        self.queue: list[str] = []
        self.ahead: list[str] = []
        self.running: str | None = None
        self.service_s = 0.5
        self.owed = 0
        self.firsts = 0
        self._heap: list[tuple[float, int, str, str]] = []
        self._number = 0
        self._made = 0

    # what the outside puts in

    def begin(self, turns: list[Turn], at_s: float, following: Iterator[list[Turn]] | None = None) -> None:
        """A new session whose first turn comes at `at_s`."""
        name = self._name()
        self.slots[name] = Slot(turns, following)
        self.sessions[name] = SessionView(name, 0, State.PAUSED, at_s, born_s=at_s)
        self._at(at_s, "come", name)

    def begin_paused(self, turns: list[Turn], index: int, left: float, following: Iterator[list[Turn]]) -> None:
        """A session found in the pause after turn `index`, `left` of which is still to come (0 to 1)."""
        name = self._name()
        before = turns[index]
        tokens = sum(turn.new_tokens + turn.out_tokens for turn in turns[: index + 1])
        self.slots[name] = Slot(turns, following, index + 1)
        size = tokens * self.hardware.bytes_per_token
        place = next((place for place in self.tiers if self._free(place) >= size), None)
        if place is not None:
            self.used[place] += size
        began_s = -before.pause_s * (1 - left)
        born_s = began_s - sum(turn.pause_s for turn in turns[:index])
        self.sessions[name] = SessionView(
            name, tokens, before.state, began_s, before.tool, before.timeout_s, resident=place is Place.DEVICE,
            copy=place if place is not Place.DEVICE else None,
            copy_to=tokens if place not in (None, Place.DEVICE) else 0, turn=index + 1,
            born_s=born_s,
        )  # fmt: skip
        self._return_at(began_s + before.pause_s, name)

    def run(self) -> Outcome:
        """Until so many first tokens were measured, or nothing is left to happen.

        The mean wait is by Little's law: the time that all sessions waited, over the first tokens that came. So a
        session that an order never serves counts for as long as it waits, be it before its first turn.
        """
        while self._heap and self.firsts < self.warm + self.measure:
            before_s = self.now_s
            self.now_s, _, kind, name = heapq.heappop(self._heap)
            if self.firsts >= self.warm:
                self.outcome.waited_s += self.owed * (self.now_s - before_s)
            if kind == "done":
                self._done(name)
            elif kind == "chunk":
                self.running = None
            elif kind in ("return", "come"):
                self._come(name, returned=kind == "return")
            self._dispatch()
        return self.outcome

    # events

    def _come(self, name: str, returned: bool) -> None:
        self.owed += 1
        if returned:
            self._ask(Reason.TOOL_ENDED, name)
        self._become(name, state=State.WAITING, since_s=self.now_s)
        self.queue.append(name)

    def _dispatch(self) -> None:
        """Fills the head of the queue with room and bytes, then starts the first that is ready."""
        while self.queue and len(self.ahead) < AHEAD:
            name = self._first(self.queue)
            if not self._admit(name):
                break
            self.queue.remove(name)
            self.ahead.append(name)
        if self.running is not None or not self.ahead:
            return
        ready = [name for name in self.ahead if self.slots[name].ready_s <= self.now_s]
        if ready:
            self._serve(self._first(ready))
        else:
            self._at(min(self.slots[name].ready_s for name in self.ahead), "ready", "")

    def _first(self, names: list[str]) -> str:
        return first_served([self._as_waiting(name) for name in names])

    def _as_waiting(self, name: str) -> Waiting:
        session = self.sessions[name]
        return Waiting(name, session.since_s, self._rank(name), self.slots[name].overtaken)

    def _rank(self, name: str) -> float:
        return self.order(self.sessions[name], self._left_s(name))

    def _left_s(self, name: str) -> float:
        """Of its prefill, if it were served now; what a pause will bring in is not known."""
        slot, session = self.slots[name], self.sessions[name]
        if slot.gaps:
            return sum(self.hardware.prefill.seconds(stop, start) for start, stop in slot.gaps)
        new_tokens = slot.turn.new_tokens if session.state is State.WAITING else 0
        return left_s(session, new_tokens, self.hardware.prefill)

    def _admit(self, name: str) -> bool:
        """Room on the device for the whole turn, and the bytes that are in a tier on their way; False if no room."""
        slot, session = self.slots[name], self.sessions[name]
        tokens = session.tokens + slot.turn.new_tokens + slot.turn.out_tokens
        size = (tokens - (session.tokens if session.resident else 0)) * self.hardware.bytes_per_token
        short = size - self._free(Place.DEVICE)
        if short > 0:
            self._apply(self._ask(Reason.PRESSURE, name, need_bytes=short))
            if self._free(Place.DEVICE) < size:
                return False
        slot.ready_s = self._room_s(size)
        self.used[Place.DEVICE] += size
        self._become(name, held=True)
        slot.head, slot.tail = 0, session.tokens if session.resident else 0
        if not session.resident and session.tokens:
            self._fetch(name)
        return True

    def _fetch(self, name: str) -> None:
        slot, session = self.slots[name], self.sessions[name]
        for move in self._ask(Reason.SCHEDULED, name):
            if move.kind == "prefetch" and session.copy is move.place:
                slot.ready_s = self._read(move, slot, max(self.now_s, slot.ready_s))
                slot.head, slot.tail = session.copy_from, session.copy_to
                return

    def _serve(self, name: str) -> None:
        """A chunk of its prefill or, after the last, its first token and all of its decoding."""
        slot = self.slots[name]
        if not slot.gaps:
            self._start(name)
        self.running = name
        start, stop = slot.gaps.pop(0)
        cut = min(stop, start + CHUNK)
        if cut < stop:
            slot.gaps.insert(0, (cut, stop))
        ends_s = self.now_s + self.taxed_s + self.hardware.prefill.seconds(cut, start)
        self.taxed_s = 0.0
        slot.served_s += ends_s - self.now_s
        if slot.gaps:
            self._at(ends_s, "chunk", name)
            return
        self.ahead.remove(name)
        decode_s = slot.turn.out_tokens / self.hardware.decode_tps
        self._first_token(ends_s)
        self.outcome.events.append((f"{name}/{slot.index}", ends_s))
        self.outcome.turns += 1
        self.service_s += 0.05 * (slot.served_s + decode_s - self.service_s)
        self._at(ends_s + decode_s, "done", name)

    def _start(self, name: str) -> None:
        slot, session = self.slots[name], self.sessions[name]
        slot.overtaken = 0
        slot.served_s = 0.0
        self.outcome.promoted_bytes += slot.promoted_bytes
        slot.promoted_bytes = 0
        for other in (*self.queue, *self.ahead):
            self.slots[other].overtaken += self.sessions[other].since_s < session.since_s
        self.outcome.recomputed_tokens += slot.head + session.tokens - slot.tail
        slot.gaps = [(0, slot.head)] if slot.head else []
        slot.gaps.append((slot.tail, session.tokens + slot.turn.new_tokens))
        self._become(name, state=State.RUNNING, resident=True, held=True)

    def _first_token(self, first_s: float) -> None:
        self.owed -= 1
        if self.firsts >= self.warm:
            self.outcome.firsts += 1
            self.outcome.waited_s += first_s - self.now_s
        self.firsts += 1

    def _done(self, name: str) -> None:
        slot, turn = self.slots[name], self.slots[name].turn
        self.running = None
        tokens = self.sessions[name].tokens + turn.new_tokens + turn.out_tokens
        self._become(name, tokens=tokens, held=False)
        if turn.last:
            self._close(name)
            return
        slot.index += 1
        self._become(
            name, state=turn.state, since_s=self.now_s, tool=turn.tool, timeout_s=turn.timeout_s, turn=slot.index
        )
        self._return_at(self.now_s + turn.pause_s, name)
        self._apply(self._ask(Reason.TOOL_STARTED, name))

    def _close(self, name: str) -> None:
        session, slot = self.sessions.pop(name), self.slots.pop(name)
        self.used[Place.DEVICE] -= session.tokens * self.hardware.bytes_per_token
        if session.copy is not None:
            self.used[session.copy] -= (session.copy_to - session.copy_from) * self.hardware.bytes_per_token
        if slot.following is not None:
            self.begin(next(slot.following), self.now_s, slot.following)

    # decisions

    def _ask(self, reason: Reason, name: str, need_bytes: int = 0) -> list[Move]:
        return self.policy.decide(self._view(reason, name, need_bytes))

    def _view(self, reason: Reason, name: str, need_bytes: int = 0) -> View:
        tiers = tuple(
            dataclasses.replace(
                tier, used_bytes=self.used[place], queued_s=max(0.0, self.reads[place].free_at - self.now_s)
            )
            for place, tier in self.tiers.items()
        )
        waiting = len(self.queue) + self._served()
        return View(
            self.now_s, reason, name, self.sessions, tiers, self.hardware.prefill, self.hardware.bytes_per_token,
            waiting, self.service_s, need_bytes, self._line(),
        )  # fmt: skip

    def _served(self) -> int:
        """How many have their room; who decodes is no longer among those ahead."""
        return len(self.ahead) + (self.running is not None and self.running not in self.ahead)

    def _line(self) -> dict[str, int]:
        """Who is served before whom; those in a pause as if they came back now."""
        first = self._served()
        ranks = {name: self._rank(name) for name in self.sessions}
        queued = sorted(ranks[name] for name in self.queue)
        line = {name: first + bisect.bisect_left(queued, rank) for name, rank in ranks.items()}
        line.update((name, place) for place, name in enumerate(self.ahead))
        return line

    # small things

    def _at(self, when_s: float, kind: str, name: str) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when_s, self._number, kind, name))

    def _return_at(self, when_s: float, name: str) -> None:
        self.ends_s[name, self.slots[name].index] = when_s
        self._at(when_s, "return", name)

    def _name(self) -> str:
        self._made += 1
        return f"s{self._made}"
