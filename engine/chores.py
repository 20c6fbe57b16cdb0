"""Moves of the policy, done one after another, so that what one frees is there when the next one writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.decisions import Decision
from engine.journal import Journal
from engine.kvcall import KvCall
from engine.moves import Moved, Moves
from engine.sessions import SessionKv
from engine.sight import TIER_OF, Sight
from engine.speeds import Speeds
from engine.store import KvStore
from kvtier import Tier, TierStats
from kvtier.policy import Move, Place, State


@dataclass
class _Task:
    """A move that waits for the ones before it."""

    move: Move
    record: SessionKv
    epoch: int
    entry: Decision
    then: Callable[[Moved], None] | None = None
    turns: int = 0  # that the session had had when this was decided


class Chores:
    """On the compute thread."""

    def __init__(self, store: KvStore, moves: Moves, journal: Journal, speeds: Speeds, sight: Sight) -> None:
        self._store, self._moves, self._journal, self._speeds, self._sight = store, moves, journal, speeds, sight
        self._tasks: deque[_Task] = deque()
        self._busy = False
        self._going_on = False

    def add(self, move: Move, reason: str, call: KvCall, then: Callable[[Moved], None] | None) -> None:
        record = self._store.sessions.get(move.session)
        if record is None or move.kind not in ("store", "evict"):
            return
        step = call.step if record.name == call.session else 0
        if move.kind == "evict":
            entry = self._journal.absent(record, reason, move.place, move.predicted_s, step)
            if move.place is Place.DEVICE:
                self._moves.free_device(record, record.keys)
                return
        else:
            tier, tokens = TIER_OF[move.place], move.size_bytes // self._sight.token_bytes
            entry = self._journal.log(
                record.name,
                reason,
                "store",
                tier.value,
                tokens,
                step=step,
                predicted_s=self._speeds.links[tier].write_s(move.size_bytes),
                instead_s=self._speeds.compute_s(0, len(record.tokens)),
            )
        epoch = call.epoch if record.name == call.session else 0
        self._tasks.append(_Task(move, record, epoch, entry, then, record.turns))

    def go_on(self) -> None:
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
            self.want(record, False)
            self._moves.free_tier(record, tier, freed)

    def _skip(self, task: _Task, why: str) -> None:
        self._journal.decisions.settle(task.entry, None, "moot", why)
        self._done(task, Moved("missing", detail=why))

    def _ended(self, task: _Task, moved: Moved) -> None:
        """The next decision is to see what this move left."""
        self.look_at_usage(lambda: self._done(task, moved))

    def _done(self, task: _Task, moved: Moved) -> None:
        self._busy = False
        if task.then is not None:
            task.then(moved)
        self.go_on()

    def _was_stored(self, task: _Task, tier: Tier, tokens: int, moved: Moved) -> None:
        """`tokens`: those that it had when the copy began; it may have gone on since."""
        record = task.record
        link = self._speeds.links[tier]
        self._journal.stored(task.entry, link, moved.bytes, moved.seconds, moved.whole, moved.detail)
        self._speeds.write_took(tier, moved.bytes, moved.seconds)
        if moved.whole:
            record.copy, record.copy_to = tier, min(tokens, len(record.tokens))
            if record.pause is not None and record.pause.state in (State.APPROVAL, State.PAUSED):
                self._moves.free_device(record, record.keys)

    def want(self, record: SessionKv, wanted: bool) -> None:
        """Whether a dirty page of the session is worth writing when the device gives it up."""
        if wanted:
            self._store.unwanted.difference_update(record.keys)  # also those that another one did not want
        else:
            is_private = self._store.sessions.is_private
            self._store.unwanted.update(key for key in record.keys if is_private(record, key))

    def look_at_usage(self, then: Callable[[], None] = lambda: None) -> None:
        """Asked in the lane that changes the tiers, since their counters wait for writers."""
        stack = self._store.stack

        def looked(stats: TierStats | None) -> None:
            self._sight.usage = stats or self._sight.usage
            then()

        if stack is None:
            then()
        else:
            self._store.lanes.write(stack.stats, looked)
