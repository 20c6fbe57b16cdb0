"""From a keep-value to moves: whoever is worth least goes down a tier, the newcomer included."""

from __future__ import annotations

from typing import Protocol

from kvtier.policy.index import break_even_tokens
from kvtier.policy.plan import Plan
from kvtier.policy.values import Move, Place, Prefill, Reason, SessionView, State, View

BY_A_PERSON = (State.APPROVAL, State.PAUSED)
Rates = tuple[float, float, float, float, Prefill, int]
"""Read and write bandwidth, latency, tax, prefill, bytes per token: what a break-even follows from."""


class Keep(Protocol):
    """What makes one policy differ from another: the worth of keeping a part of a session's KV in a place.

    Only the order matters, within one place and one view. LRU is the time of the last use; a TTL is whether it has
    run out; the shadow price of a place is the keep-value of the last one that still fits.
    """

    def learn(self, view: View) -> None:
        """Called first with every view; where the reason is TOOL_ENDED the subject is still in its pause."""

    def worth(self, session: SessionView, place: Place, view: View, start: int, stop: int) -> float:
        """Of its tokens `start` to `stop`, given that those behind are kept; per byte."""


class Policy:
    """Copy when a tool starts, evict before someone needs the room, read back what will be scheduled.

    Under pressure nothing is held twice: a copy of what the device still holds saves no more than being written again,
    so it gives way to whatever lies nowhere else, and what waits for a person stays on the device if no tier has room.

    `careful`: a tier must never make things slower than no tier: store only from the break-even length on, and
    restore only where that is quicker than recomputing at this moment.
    `demotes`: what waits for a person leaves the device as soon as a tier holds it.
    `reserves`: when a tool starts, room for another session like it is made, so that none has to wait for a write.
    `pieces`: into how many a session is divided where something has to be dropped. Its head is cheapest to compute
    again, as attention grows with position, so heads are dropped first and tails kept (as Pensieve does; Cake computes
    heads while tails load).
    """

    def __init__(
        self, keep: Keep, *, careful: bool = True, demotes: bool = True, pieces: int = 8, reserves: bool = True
    ) -> None:
        self.keep = keep
        self.careful = careful
        self.demotes = demotes
        self.pieces = pieces
        self.reserves = reserves
        self._least: dict[Rates, int | None] = {}

    def decide(self, view: View) -> list[Move]:
        """The moves, in order. Sizes never exceed what the view says is free plus what earlier moves free."""
        self.keep.learn(view)
        subject = view.sessions[view.subject]
        if view.reason is Reason.TOOL_STARTED:
            return self._paused(subject, view)
        if view.reason is Reason.SCHEDULED:
            return self._scheduled(subject, view)
        if view.reason is Reason.PRESSURE:
            return self._pressed(subject, view)
        return []

    def admits(self, session: SessionView, place: Place, view: View) -> bool:
        """Whether this length is worth storing there at all."""
        if not self.careful:
            return True
        tier = view.by_place[place]
        key = (tier.read_bps, tier.write_bps, tier.latency_s, tier.tax, view.prefill, view.bytes_per_token)
        if key not in self._least:
            self._least[key] = break_even_tokens(view.prefill, tier, view.bytes_per_token)
        least = self._least[key]
        return least is not None and session.tokens >= least

    def _paused(self, subject: SessionView, view: View) -> list[Move]:
        plan = Plan(self, view)
        stored = plan.insert(subject)
        if stored and self.demotes and subject.state in BY_A_PERSON and plan.whole(subject):
            plan.evict_device(subject)
        if self.reserves:
            self._vacate(plan, view.size(subject) - plan.free[Place.DEVICE])
        return plan.moves

    def _scheduled(self, subject: SessionView, view: View) -> list[Move]:
        if subject.resident:
            return []
        recompute_s = view.compute_s(0, subject.tokens)
        recompute = Move("recompute", subject.id, Place.DEVICE, view.size(subject), recompute_s)
        if subject.copy is None:
            return [recompute]
        size = (subject.copy_to - subject.copy_from) * view.bytes_per_token
        restore_s = view.by_place[subject.copy].queued_s + view.absent_s(subject)
        if self.careful and restore_s > recompute_s:
            return [recompute]
        return [Move("prefetch", subject.id, subject.copy, size, restore_s)]

    def _pressed(self, subject: SessionView, view: View) -> list[Move]:
        plan = Plan(self, view)
        self._vacate(plan, view.need_bytes, subject.id)
        return plan.moves

    def _vacate(self, plan: Plan, need: int, spared: str = "") -> None:
        """Frees so many bytes of the device; who is worth least there goes, to a tier where one takes it."""
        if need <= 0:
            return
        view = plan.view
        resident = [s for s in map(plan.now, view.sessions.values()) if s.resident and not s.held and s.id != spared]
        resident.sort(key=lambda s: self.keep.worth(s, Place.DEVICE, view, 0, s.tokens))
        for victim in resident:
            if need <= 0:
                break
            if not plan.whole(victim):
                plan.insert(plan.leaving(victim))
            plan.evict_device(victim)
            need -= view.size(victim)
