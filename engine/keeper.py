"""Which session's KV lies where: the engine's end of `kvtier.policy`.

The policy is asked when a session begins to wait, when its wait ends, and when the device runs short. It sees hints of
what lies where: what the last move left, verified on load. Everything here runs on the compute thread and blocks on
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.chores import Chores
from engine.core import EngineCore
from engine.decisions import DecisionLog
from engine.facts import PAGE_SIZE
from engine.journal import Journal
from engine.kvcall import KvCall, PauseHint
from engine.moves import Moved, Moves
from engine.observer import Computed, Observer, Return
from engine.sessions import SessionKv
from engine.sight import TIER_OF, Sight
from engine.speeds import Speeds
from kvtier import Tier
from kvtier.policy import Expected, Move, Place, Policy, Reason, TierKeep, View, break_even_tokens

Answer = Callable[[Moved, Tier | None], None]


class Keeper(Observer):
    """See the module. `decisions` is the log that it writes."""

    def __init__(
        self,
        core: EngineCore,
        moves: Moves,
        decisions: DecisionLog,
        speeds: Speeds,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decisions = decisions
        self.speeds = speeds
        self._core = core
        self._store = core.store
        self._moves = moves
        self._policy = policy or Policy(TierKeep(Expected()), pieces=1, reserves=False)
        self._clock = clock
        self._sight = Sight(core, speeds, clock)
        self._token_bytes = self._sight.token_bytes
        self.journal = Journal(decisions, speeds, self._token_bytes)
        self._chores = Chores(core.store, moves, self.journal, speeds, self._sight)
        core.observe(self)

    # -- what happens ---------------------------------------------------------------------------------------------

    def paused(self, record: SessionKv, call: KvCall, answer: Answer) -> None:
        """A session begins to wait: the policy says where its pages go. `answer` comes when they are there."""
        self.waits(record, call)
        self._chores.look_at_usage()
        view = self._sight.view(Reason.TOOL_STARTED, record)
        moves = self._policy.decide(view)
        self._write_whole(view, moves)
        self._chores.want(record, True)
        mine = next((move for move in moves if move.kind == "store" and move.session == record.name), None)
        if mine is None:
            self._stays(record, call, view, answer)
        for move in moves:
            then = None
            if move is mine:
                tier = TIER_OF[move.place]
                then = self._answered(answer, tier)
            self._chores.add(move, "tool_started" if move.session == record.name else "pressure", call, then)
        self._chores.go_on()

    def waits(self, record: SessionKv, call: KvCall) -> None:
        """A session begins to wait, and somebody else has said where its pages go."""
        record.pause, record.since_s = call.pause or PauseHint(), self._clock()

    def ended(self, record: SessionKv, call: KvCall) -> bool:
        """The wait is over: its length is learned. Whether its pages should be fetched; False means that computing them
        again is quicker."""
        if record.pause is not None:
            self._policy.decide(self._sight.view(Reason.TOOL_ENDED, record))
            record.pause, record.since_s = None, self._clock()
        view = self._sight.view(Reason.SCHEDULED, record)
        moves = self._policy.decide(view)
        self._write_whole(view, moves)
        return not any(move.kind == "recompute" and record.copy is not None for move in moves)

    # -- what the core tells --------------------------------------------------------------------------------------

    def submitted(self, session: str) -> None:
        """Whatever it waited for is over."""
        record = self._store.sessions.get(session)
        if record is not None:
            record.pause, record.turns = None, record.turns + 1
            self._chores.want(record, True)

    def admitted(self, session: str, pages: int) -> None:
        """Of what others have cached, that which is worth least makes room first."""
        need = pages - self._store.pool.counts().free
        victims = [] if need <= 0 or self._store.stack is None else self._victims(session)
        if not victims:
            return
        view = self._sight.view(Reason.PRESSURE, self._store.sessions.get(session) or victims[0])
        worth = self._policy.keep.worth
        victims.sort(key=lambda r: worth(view.sessions[r.name], Place.DEVICE, view, 0, len(r.tokens)))
        offered: list[bytes] = []
        for victim in victims:
            if len(offered) >= need:
                break
            offered += reversed(victim.keys)  # what is left is a prefix, which is of use
            self.journal.absent(victim, "pressure", Place.DEVICE, view.absent_s(view.sessions[victim.name]), 0)
        self._store.pool.offer(offered)

    def _victims(self, session: str) -> list[SessionKv]:
        running = {request.spec.session for request in self._core.scheduler.requests()} | {session}
        return [
            record
            for record in self._store.sessions.all()
            if record.name not in running and not record.pinned_blocks and self._sight.resident(record)
        ]

    def pays(self, tokens: Mapping[Tier, int], start: int) -> bool:
        return self.speeds.pays(tokens, start, self._token_bytes)

    def returned(self, session: str, what: Return) -> None:
        sources = what.sources.by_tier()
        if sources:
            self.journal.read(session, "scheduled", "restore", sources, what.sources.device, what.seconds)
            self._learn(sources, what.seconds)
        if not what.recomputed:
            self.journal.back(session, what.seconds if sources else 0.0)

    def computed(self, session: str, what: Computed) -> None:
        if what.alone:
            self.speeds.prefill_took(what.start, what.stop, what.seconds)
        if not what.recomputed:
            return
        predicted = self.speeds.compute_s(what.start, what.start + what.recomputed)
        share = what.seconds * what.recomputed / max(what.stop - what.start, 1)
        self.journal.log(
            session,
            "scheduled",
            "recompute",
            "device",
            what.recomputed,
            predicted_s=predicted,
            realised_s=share,
            instead_s=predicted,
        )
        self.journal.back(session, share)

    def rested(self, session: str, turn_s: float) -> None:
        self.speeds.turn_took(turn_s)
        record = self._store.sessions.get(session)
        if record is not None:
            record.since_s = self._clock()
            record.born_s = record.born_s or record.since_s
            record.copy_to = min(record.copy_to, len(record.tokens))
            self._chores.want(record, True)  # it may have found pages that another session had no use for

    # -- what others ask for --------------------------------------------------------------------------------------

    def brought(self, record: SessionKv, call: KvCall, tokens: Mapping[Tier, int], seconds: float) -> None:
        """Pages of a session were read back ahead of its next generation."""
        if not tokens:
            return
        self.journal.read(record.name, "tool_ended", "prefetch", tokens, 0, seconds, call.step)
        self._learn(tokens, seconds)
        self.journal.back(record.name, seconds)

    def _learn(self, tokens: Mapping[Tier, int], seconds: float) -> None:
        """A read of one tier tells of its speed; one of several does not say whose."""
        if len(tokens) == 1:
            ((tier, count),) = tokens.items()
            self.speeds.read_took(tier, count * self._token_bytes, seconds)

    def break_even(self) -> dict[str, int | None]:
        """By tier: from how many tokens on reading back is quicker than computing. None: never."""
        prefill = self.speeds.scaled_prefill
        if self.speeds.prefill is None:
            return {}
        tiers = [tier for tier in self._sight.tiers() if tier.place is not Place.DEVICE]
        return {tier.place.value: break_even_tokens(prefill, tier, self._token_bytes) for tier in tiers}

    def stored(self, record: SessionKv, tier: Tier, moved: Moved) -> None:
        """The hint of where a copy lies, after somebody's store."""
        if moved.pages and tier is not Tier.SHARED:
            record.copy, record.copy_to = tier, min(moved.pages * PAGE_SIZE, len(record.tokens))

    def _answered(self, answer: Answer, tier: Tier) -> Callable[[Moved], None]:
        return lambda moved: answer(moved, tier)

    def _stays(self, record: SessionKv, call: KvCall, view: View, answer: Answer) -> None:
        """No move for the session itself: its copy is there already, or no tier is worth it."""
        session = view.sessions[record.name]
        if session.copy is not None and session.copy_to >= session.tokens:
            self._look_again(record, call, TIER_OF[session.copy], answer)
            return
        if not any(place in view.by_place for place in TIER_OF):
            detail = "this engine has neither host memory nor NVMe for pages"
        elif not any(self._policy.admits(session, place, view) for place in TIER_OF if place in view.by_place):
            detail = "so short a context is computed again sooner than it is read back"
        else:
            detail = "what the tiers hold is worth more"
        self._chores.want(record, False)
        entry = self.journal.log(record.name, "tool_started", "keep", "device", len(record.tokens), step=call.step)
        self.decisions.settle(entry, None, "done", detail)
        answer(
            Moved("rejected", detail=f"{detail}; the pages stay on the device until someone needs their place"), None
        )

    def _look_again(self, record: SessionKv, call: KvCall, tier: Tier, answer: Answer) -> None:
        """The copy should be there; what the tier has given up since is copied again."""

        def looked(moved: Moved) -> None:
            if not moved.whole:
                record.copy, record.copy_to = None, 0
            detail = "the copy is there already" if moved.whole and not moved.bytes else moved.detail
            answer(replace(moved, detail=detail), tier)

        self._moves.store(record, tier, call.epoch, looked)

    def _write_whole(self, view: View, moves: list[Move]) -> None:
        task = self.decisions.whole(view, moves)
        if task is not None:
            self._store.lanes.write(task, lambda _: None)
