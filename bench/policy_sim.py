"""A device, its tiers and the links between them, in simulated seconds.

The device is one server that takes one session's turn at a time: the prefill alone, then its decoding at the rate that
a full batch reaches, as if its share of the batch were done at once. Each tier's link serves reads one after another
and writes one after another. The first sessions in the queue get their room and their bytes while the device still
serves others. A copy is readable when its write has ended; an eviction waits for that. What a demotion leaves is free
at once, as if the bytes in flight had a buffer of their own.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections.abc import Callable, Iterator

from bench.policy_load import NEVER_S, Turn
from bench.policy_machine import Hardware, Link, Outcome, Slot
from kvtier.policy import Move, Place, Policy, Reason, SessionView, State, View

AHEAD = 4
"""Sessions at the head of the queue that get room and bytes before their turn."""


class Simulation:
    """`order` ranks those who wait for the device, least first. `ends_s`: when each pause ends, for a prophet."""

    def __init__(
        self,
        hardware: Hardware,
        policy: Policy,
        order: Callable[[SessionView], float],
        warm: int = 0,
        measure: int = 1 << 60,
        ends_s: dict[tuple[str, int], float] | None = None,
    ) -> None:
        self.hardware = hardware
        self.policy = policy
        self.order = order
        self.warm, self.measure = warm, measure
        self.now_s = 0.0
        self.outcome = Outcome()
        self.tiers = {tier.place: tier for tier in hardware.tiers()}
        self.used = dict.fromkeys(self.tiers, 0)
        self.reads = {place: Link() for place in self.tiers}
        self.writes = {place: Link() for place in self.tiers}
        self.sessions: dict[str, SessionView] = {}
        self.slots: dict[str, Slot] = {}
        self.queue: list[str] = []
        self.ahead: list[str] = []
        self.running: str | None = None
        self.taxed_s = 0.0
        self.service_s = 0.5
        self.owed = 0
        self.firsts = 0
        self._heap: list[tuple[float, int, str, str]] = []
        self._number = 0
        self._made = 0
        self.ends_s = {} if ends_s is None else ends_s

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
            name = self._next()
            if not self._admit(name):
                break
            self.queue.remove(name)
            self.ahead.append(name)
        if self.running is not None or not self.ahead:
            return
        ready = [name for name in self.ahead if self.slots[name].ready_s <= self.now_s]
        if ready:
            self._start(ready[0])
        else:
            self._at(min(self.slots[name].ready_s for name in self.ahead), "ready", "")

    def _next(self) -> str:
        return min(self.queue, key=lambda name: self.order(self.sessions[name]))

    def _admit(self, name: str) -> bool:
        """Room on the device for the whole turn, and the bytes that are in a tier on their way; False if no room."""
        slot, session = self.slots[name], self.sessions[name]
        tokens = session.tokens + slot.turn.new_tokens + slot.turn.out_tokens
        size = (tokens - (session.tokens if session.resident else 0)) * self.hardware.bytes_per_token
        slot.ready_s = self.now_s
        short = size - self._free(Place.DEVICE)
        if short > 0:
            room_s = self._apply(self._ask(Reason.PRESSURE, name, need_bytes=short))
            if self._free(Place.DEVICE) < size:
                return False
            slot.ready_s = max(slot.ready_s, room_s)
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
                tier = self.tiers[move.place]
                takes_s = tier.read_s(move.size_bytes)
                start_s = max(self.now_s, slot.copy_ready_s, slot.ready_s)
                slot.ready_s = self.reads[move.place].book(start_s, takes_s, move.size_bytes)
                self.taxed_s += takes_s * tier.tax
                self.outcome.restored_bytes += move.size_bytes
                slot.head, slot.tail = session.copy_from, session.copy_to
                return

    def _start(self, name: str) -> None:
        slot, session = self.slots[name], self.sessions[name]
        self.ahead.remove(name)
        self.running = name
        self.outcome.recomputed_tokens += slot.head + session.tokens - slot.tail
        prefill = self.hardware.prefill
        head_s = prefill.seconds(slot.head)
        prefill_s = head_s + prefill.seconds(session.tokens + slot.turn.new_tokens, slot.tail)
        decode_s = slot.turn.out_tokens / self.hardware.decode_tps
        first_s = self.now_s + self.taxed_s + prefill_s
        self.taxed_s = 0.0
        self._first_token(first_s)
        self.outcome.events.append((f"{name}/{slot.index}", first_s))
        self.outcome.turns += 1
        self.service_s += 0.05 * (first_s + decode_s - self.now_s - self.service_s)
        self._become(name, state=State.RUNNING, since_s=self.now_s, resident=True, held=True)
        self._at(first_s + decode_s, "done", name)

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
        waiting = len(self.queue) + len(self.ahead) + (self.running is not None)
        return View(
            self.now_s, reason, name, self.sessions, tiers, self.hardware.prefill, self.hardware.bytes_per_token,
            waiting, self.service_s, need_bytes, self._line(),
        )  # fmt: skip

    def _line(self) -> dict[str, int]:
        """Who is served before whom; those in a pause as if they came back now."""
        first = len(self.ahead) + (self.running is not None)
        ranks = {name: self.order(session) for name, session in self.sessions.items()}
        queued = sorted(ranks[name] for name in self.queue)
        line = {name: first + bisect.bisect_left(queued, rank) for name, rank in ranks.items()}
        line.update((name, place) for place, name in enumerate(self.ahead))
        return line

    def _apply(self, moves: list[Move]) -> float:
        """Does them; when the room they make on the device is there."""
        room_s = self.now_s
        for move in moves:
            slot, session = self.slots[move.session], self.sessions[move.session]
            if move.kind == "store":
                self._store(move, slot, session)
            elif move.kind == "trim":
                self.used[move.place] -= (move.start - session.copy_from) * self.hardware.bytes_per_token
                self._become(move.session, copy_from=move.start)
            elif move.place is Place.DEVICE:
                assert session.resident
                assert not session.held
                self.used[Place.DEVICE] -= session.tokens * self.hardware.bytes_per_token
                self._become(move.session, resident=False)
                if session.copy is not None:
                    room_s = max(room_s, slot.copy_ready_s)
            else:
                self._forget(session)
            self._bury(move.session)
        over = [place for place in self.tiers if self.used[place] > self.tiers[place].capacity_bytes]
        assert not over, f"{over} hold more than they can"
        return room_s

    def _bury(self, name: str) -> None:
        """A session that never comes back is gone once nothing holds it."""
        session = self.sessions[name]
        gone = self.ends_s.get((name, self.slots[name].index), 0.0) - self.now_s > NEVER_S / 2
        if gone and not session.resident and session.copy is None:
            del self.sessions[name], self.slots[name]

    def _store(self, move: Move, slot: Slot, session: SessionView) -> None:
        tier = self.tiers[move.place]
        begin_s = max(self.now_s, slot.copy_ready_s) if session.copy is not move.place else self.now_s
        self._forget(session)
        takes_s = tier.write_s(move.size_bytes)
        slot.copy_ready_s = self.writes[move.place].book(begin_s, takes_s, move.size_bytes)
        self.taxed_s += takes_s * tier.tax
        self.outcome.stored_bytes += move.size_bytes
        self.used[move.place] += (session.tokens - move.start) * self.hardware.bytes_per_token
        self._become(move.session, copy=move.place, copy_from=move.start, copy_to=session.tokens)

    def _forget(self, session: SessionView) -> None:
        if session.copy is not None:
            self.used[session.copy] -= (session.copy_to - session.copy_from) * self.hardware.bytes_per_token
            self._become(session.id, copy=None, copy_from=0, copy_to=0)

    # small things

    def _free(self, place: Place) -> int:
        return self.tiers[place].capacity_bytes - self.used[place]

    def _become(self, name: str, **changes: object) -> None:
        self.sessions[name] = dataclasses.replace(self.sessions[name], **changes)  # type: ignore[arg-type]

    def _at(self, when_s: float, kind: str, name: str) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when_s, self._number, kind, name))

    def _return_at(self, when_s: float, name: str) -> None:
        self.ends_s[name, self.slots[name].index] = when_s
        self._at(when_s, "return", name)

    def _name(self) -> str:
        self._made += 1
        return f"s{self._made}"
