"""Which session's KV lies where: the engine's end of `kvtier.policy`.

The policy is asked when a session begins to wait, when its wait ends, and when the device runs short. It sees hints of
what lies where (what the last move left, verified on load), and its moves are done one after another, so that what one
frees is there when the next one writes. Everything here runs on the compute thread and blocks on nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from engine.core import EngineCore
from engine.decisions import Decision, DecisionLog
from engine.facts import PAGE_SIZE
from engine.kvcall import KvCall, PauseHint
from engine.moves import Moved, Moves
from engine.observer import Computed, Observer, Return
from engine.sessions import SessionKv
from engine.sight import TIER_OF, Sight
from engine.speeds import Speeds
from kvtier import Tier, TierStats
from kvtier.policy import Expected, Move, Place, Policy, Reason, State, TierKeep, View, break_even_tokens

Answer = Callable[[Moved, Tier | None], None]


@dataclass
class _Task:
    """A move that waits for the ones before it."""

    move: Move
    record: SessionKv
    epoch: int
    entry: Decision
    then: Callable[[Moved], None] | None = None
    turns: int = 0  # that the session had had when this was decided


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
        self._tasks: deque[_Task] = deque()
        self._busy = False
        self._going_on = False
        self._sight = Sight(core, speeds, clock)
        self._absent: dict[str, list[Decision]] = {}  # evictions whose price is known when the session is back
        self._token_bytes = self._sight.token_bytes
        core.observe(self)

    # -- what happens ---------------------------------------------------------------------------------------------

    def paused(self, record: SessionKv, call: KvCall, answer: Answer) -> None:
        """A session begins to wait: the policy says where its pages go. `answer` comes when they are there."""
        self.waits(record, call)
        self._look_at_usage()
        view = self._sight.view(Reason.TOOL_STARTED, record)
        moves = self._policy.decide(view)
        self._write_whole(view, moves)
        self._want(record, True)
        mine = next((move for move in moves if move.kind == "store" and move.session == record.name), None)
        if mine is None:
            self._stays(record, call, view, answer)
        for move in moves:
            then = None
            if move is mine:
                tier = TIER_OF[move.place]
                then = self._answered(answer, tier)
            self._enqueue(move, "tool_started" if move.session == record.name else "pressure", call, then)
        self._go_on()

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
            self._want(record, True)

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
            self._note_absent(victim, "pressure", Place.DEVICE, view.absent_s(view.sessions[victim.name]), 0)
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
        restored = sum(sources.values())
        if restored:
            start = what.sources.device
            self._log(
                session,
                "scheduled",
                "restore",
                "+".join(sources),
                restored,
                predicted_s=sum(self._read_s(tier, tokens) for tier, tokens in sources.items()),
                realised_s=what.seconds,
                instead_s=self.speeds.compute_s(start, start + restored),
            )
        if len(sources) == 1:
            (tier,) = sources
            self.speeds.read_took(tier, restored * self._token_bytes, what.seconds)
        if not what.recomputed:
            self._settle_absent(session, what.seconds if restored else 0.0)

    def computed(self, session: str, what: Computed) -> None:
        if what.alone:
            self.speeds.prefill_took(what.start, what.stop, what.seconds)
        if not what.recomputed:
            return
        predicted = self.speeds.compute_s(what.start, what.start + what.recomputed)
        share = what.seconds * what.recomputed / max(what.stop - what.start, 1)
        self._log(
            session,
            "scheduled",
            "recompute",
            "device",
            what.recomputed,
            predicted_s=predicted,
            realised_s=share,
            instead_s=predicted,
        )
        self._settle_absent(session, share)

    def rested(self, session: str, turn_s: float) -> None:
        self.speeds.turn_took(turn_s)
        record = self._store.sessions.get(session)
        if record is not None:
            record.since_s = self._clock()
            record.born_s = record.born_s or record.since_s
            record.copy_to = min(record.copy_to, len(record.tokens))
            self._want(record, True)  # it may have found pages that another session had no use for

    def dropped(self, session: str) -> None:
        """The session is over."""
        for entry in self._absent.pop(session, []):
            self.decisions.settle(entry, 0.0, "moot", "the session ended without coming back for it")

    # -- what others ask for --------------------------------------------------------------------------------------

    def asked(self, record: SessionKv, call: KvCall, place: str) -> Decision:
        """Somebody's intent, for the log; to be settled when it is done."""
        tokens, tier = len(record.tokens), Tier(place) if place in (*Tier,) else None
        link = self.speeds.links[tier] if tier is not None else None
        predicted = None
        if link is not None:
            size = tokens * self._token_bytes
            predicted = link.write_s(size) if call.intent == "offload" else link.read_s(size)
        return self._log(
            record.name,
            "asked",
            "store" if call.intent == "offload" else call.intent,
            place,
            tokens,
            step=call.step,
            predicted_s=predicted,
            instead_s=self.speeds.compute_s(0, tokens),
        )

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

    # -- moves, one after another ---------------------------------------------------------------------------------

    def _enqueue(self, move: Move, reason: str, call: KvCall, then: Callable[[Moved], None] | None) -> None:
        record = self._store.sessions.get(move.session)
        if record is None or move.kind not in ("store", "evict"):
            return
        step = call.step if record.name == call.session else 0
        if move.kind == "evict":
            entry = self._note_absent(record, reason, move.place, move.predicted_s, step)
            if move.place is Place.DEVICE:
                self._moves.free_device(record, record.keys)
                return
        else:
            tier, tokens = TIER_OF[move.place], move.size_bytes // self._token_bytes
            entry = self._log(
                record.name,
                reason,
                "store",
                tier.value,
                tokens,
                step=step,
                predicted_s=self.speeds.links[tier].write_s(move.size_bytes),
                instead_s=self.speeds.compute_s(0, len(record.tokens)),
            )
        epoch = call.epoch if record.name == call.session else 0
        self._tasks.append(_Task(move, record, epoch, entry, then, record.turns))

    def _go_on(self) -> None:
        """In one loop, however many end at once: hundreds that called each other would exhaust the stack."""
        if self._going_on:
            return
        self._going_on = True
        while self._tasks and not self._busy:
            self._busy = True
            self._start(self._tasks.popleft())
        self._going_on = False

    def _start(self, task: _Task) -> None:
        record, tier, tokens = task.record, TIER_OF[task.move.place], len(task.record.tokens)

        def stored(moved: Moved) -> None:
            self._was_stored(task, tier, tokens, moved)
            self._ended(task, moved)

        def freed(moved: Moved) -> None:
            if record.copy is tier:
                record.copy, record.copy_to = None, 0
            self._ended(task, moved)

        if self._store.sessions.get(record.name) is not record:
            self._skip(task, "the session was dropped meanwhile")
        elif task.move.kind == "store":
            self._moves.store(record, tier, task.epoch, stored)
        elif record.turns != task.turns:
            self._skip(task, "the session came back meanwhile")
        else:
            self._want(record, False)
            self._moves.free_tier(record, tier, freed)

    def _skip(self, task: _Task, why: str) -> None:
        self.decisions.settle(task.entry, None, "moot", why)
        self._done(task, Moved("missing", detail=why))

    def _ended(self, task: _Task, moved: Moved) -> None:
        """The next decision is to see what this move left."""
        self._look_at_usage(lambda: self._done(task, moved))

    def _done(self, task: _Task, moved: Moved) -> None:
        self._busy = False
        if task.then is not None:
            task.then(moved)
        self._go_on()

    def _was_stored(self, task: _Task, tier: Tier, tokens: int, moved: Moved) -> None:
        """`tokens`: those that it had when the copy began; it may have gone on since."""
        record = task.record
        status = "done" if moved.whole else "failed"
        self.decisions.settle(task.entry, moved.seconds, status, moved.detail)
        self.speeds.write_took(tier, moved.bytes, moved.seconds)
        if moved.whole:
            record.copy, record.copy_to = tier, min(tokens, len(record.tokens))
            if record.pause is not None and record.pause.state in (State.APPROVAL, State.PAUSED):
                self._moves.free_device(record, record.keys)

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
        self._want(record, False)
        entry = self._log(record.name, "tool_started", "keep", "device", len(record.tokens), step=call.step)
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

    # -- the log --------------------------------------------------------------------------------------------------

    def _log(
        self,
        session: str,
        reason: str,
        action: str,
        place: str,
        tokens: int,
        *,
        step: int = 0,
        predicted_s: float | None = None,
        realised_s: float | None = None,
        instead_s: float | None = None,
    ) -> Decision:
        """An entry; settled where it is known what it took."""
        entry = self.decisions.add(
            session,
            reason,
            action,
            place,
            step=step,
            tokens=tokens,
            bytes=tokens * self._token_bytes,
            predicted_s=predicted_s,
            instead_s=instead_s or None,
        )
        if realised_s is not None:
            self.decisions.settle(entry, realised_s)
        return entry

    def _note_absent(self, record: SessionKv, reason: str, place: Place, cost_s: float, step: int) -> Decision:
        """One entry for a place, until the session is back: that it was offered before and is still there, or is asked
        to go twice, makes no second absence."""
        for entry in self._absent.get(record.name, ()):
            if entry.place == place.value and entry.status == "open":
                return entry
        entry = self._log(record.name, reason, "evict", place.value, len(record.tokens), step=step, predicted_s=cost_s)
        self._absent.setdefault(record.name, []).append(entry)
        return entry

    def _settle_absent(self, name: str, seconds: float) -> None:
        for entry in self._absent.pop(name, []):
            self.decisions.settle(entry, seconds)

    def _write_whole(self, view: View, moves: list[Move]) -> None:
        task = self.decisions.whole(view, moves)
        if task is not None:
            self._store.lanes.write(task, lambda _: None)

    # -- the tiers ------------------------------------------------------------------------------------------------

    def _look_at_usage(self, then: Callable[[], None] = lambda: None) -> None:
        """Asked in the lane that changes the tiers, since their counters wait for writers."""
        stack = self._store.stack

        def looked(stats: TierStats | None) -> None:
            self._sight.usage = stats or self._sight.usage
            then()

        if stack is None:
            then()
        else:
            self._store.lanes.write(stack.stats, looked)

    def _read_s(self, tier: Tier, tokens: int) -> float:
        return self.speeds.links[tier].read_s(tokens * self._token_bytes) if tokens else 0.0

    def _want(self, record: SessionKv, wanted: bool) -> None:
        """Whether a dirty page of the session is worth writing when the device gives it up."""
        if wanted:
            self._store.unwanted.difference_update(record.keys)  # also those that another one did not want
        else:
            is_private = self._store.sessions.is_private
            self._store.unwanted.update(key for key in record.keys if is_private(record, key))
