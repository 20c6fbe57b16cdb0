"""Random walks: verbs, answers, messages, steps and crashes in any order, and what must hold after each of them.

The driver does what the workflow and a node do, with the store's own functions; nodes die between any two writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest

from runtime.errors import Conflict, InvalidRequest, StaleEpoch
from runtime.steps import interrupting
from runtime.steps.recent import Past, Recent, past
from runtime.store import branches, commands, fleet, questions, sessions, standing, steps
from runtime.store.questions import Asked
from runtime.store.values import Checkpoint, Segment
from tests.runtime.store.conftest import CONFIG, Story
from workflows.contract import StepIn
from workflows.policies import Next, next_action
from workflows.states import Event as Move

TENANT = fleet.DEFAULT_TENANT
VERBS = ("pause", "resume", "retry", "interrupt", "rewind")


class Crash(Exception):
    """The node dies here; what it wrote stays."""


class Walker(Story):
    def __init__(self, db, chance: random.Random) -> None:
        super().__init__(db)
        self.chance = chance
        self.owner = None
        self.interrupt = False
        self.zombies: list[tuple] = []
        self.ended: dict[int, tuple] = {}
        self.recent = Recent()
        self.kept_ones = 0

    async def start(self) -> None:
        """With a limit or without one: steps are written in one way and in the other."""
        await fleet.ensure_admin(self.db, "key")
        config = {**CONFIG, "budget": {"steps": 8} if self.chance.random() < 0.5 else {}}
        await sessions.create(self.db, TENANT, self.session_id, config, 1)

    # What users do -----------------------------------------------------------------------------------------

    async def ask(self) -> None:
        verb = self.chance.choice(VERBS)
        argument = {}
        if verb == "rewind":
            argument = {"step": self.chance.randint(1, 12), "resume": self.chance.random() < 0.5}
        try:
            await commands.accept(self.db, TENANT, self.session_id, sessions.new_id("cmd"), verb, argument)
        except (Conflict, InvalidRequest):
            return
        self.interrupt = self.interrupt or (verb == "interrupt" and self.chance.random() < 0.8)  # word may be lost

    async def answer(self) -> None:
        for row in await self.db.fetch("SELECT * FROM questions WHERE state = 'open'"):
            decision = self.chance.choice(sorted(questions.DECISIONS[row["kind"]]))
            given = {"decision": decision}
            if decision == "raise":
                given["budget"] = {"steps": 8.0 + await self.db.run(self._spent)}
            await questions.answer(self.db, TENANT, row["question_id"], given)

    async def _spent(self, connection) -> int:
        return await connection.fetchval("SELECT spent_steps FROM sessions WHERE session_id = $1", self.session_id)

    # What the workflow does ----------------------------------------------------------------------------------

    async def go_on(self) -> bool:
        """One move of the workflow; False: there is none."""
        waiting = await self.db.fetch("SELECT 1 FROM commands WHERE state = 'accepted'")
        at = await self.at()
        if not (self.interrupt or waiting) and not self._may_step(at):
            return False
        try:
            if self.owner is None:
                self.owner = await self.take_over()
            await self._move(bool(waiting))
        except (Crash, StaleEpoch):
            self.owner = None
        return True

    @staticmethod
    def _may_step(at) -> bool:
        if at.hold:
            return at.hold == "failed" and at.unread > 0
        return next_action(at) is not Next.REST or at.unread > 0

    async def _move(self, waiting: bool) -> None:
        if self.interrupt:
            await self._interrupt()
            self.interrupt = False
        elif waiting:
            applied = await commands.apply(self.db, self.session_id)
            self.interrupt = applied.interrupt
            self.owner = None if applied.moved else self.owner
        else:
            await self._step(await self.at())

    async def _step(self, at) -> None:
        no, action = at.step_no + 1, next_action(at)
        if self.chance.random() < 0.05:
            await sessions.fail(self.db, self.session_id, "refused")
        elif action is Next.REST or at.hold:
            await self._input(no)
        elif action is Next.THINK:
            await self._think(no)
        else:
            await self._tool(no)

    async def _input(self, no: int) -> None:
        message_id, _, options = await sessions.message_to_take(self.db, self.session_id, no)
        attempt = await self.begin(self.owner, no, "input", message=message_id)
        if not attempt.held:
            self._may_crash()
            output = {"outcome": "input", "message_id": message_id, "options": options}
            await self._complete(attempt, [Segment("message", [no])], output, None)

    async def _think(self, no: int) -> None:
        attempt = await self.begin(self.owner, no)
        if attempt.held:
            return
        for _ in range(self.chance.randint(1, 3)):
            self._may_crash()
            durable = sum(len(s.token_ids) for s in (await self._durable(no)) if s.kind == "model")
            await steps.append_tokens(self.db, self.owner, attempt, durable, [no], "x")
        outcome = self.chance.choice(("final", "tools"))
        to = None if outcome == "tools" else Move.REST
        output = {"outcome": outcome, "calls": [], "text": "", "kv_tokens": no}
        await self._complete(attempt, [], output, to, think=True)

    async def _tool(self, no: int) -> None:
        attempt = await self.begin(self.owner, no, "tool")
        if attempt.held:
            return
        asked = [Asked("approval", call, {}) for call in range(no % 3)]
        answers = await steps.hold(self.db, self.owner, attempt, asked) if asked else []
        if any(answer.state == "open" for answer in answers):
            return
        self._may_crash()
        await self._complete(attempt, [Segment("tool", [no])], {"outcome": "settled"}, None)

    async def _interrupt(self) -> None:
        if (await sessions.get(self.db, self.session_id)).state in ("failed", "created"):
            return
        if self.chance.random() < 0.05:
            return await sessions.fail(self.db, self.session_id, "it could not be interrupted")
        running = await self.db.fetchrow("SELECT kind FROM steps WHERE state = 'running'")
        kind, at = running and running["kind"], await self.at()
        no = at.step_no + 1
        if kind == "tool" or (kind is None and next_action(at) is Next.TOOLS):
            await self._end_turn(no, "tool", [Segment("tool", [no])])
        elif kind == "think" and any(s.kind == "model" for s in await self._durable(no)):
            await self._end_turn(no, "think", [])
        elif kind == "think" or (kind is None and next_action(at) is not Next.REST):
            await interrupting._decide(SimpleNamespace(db=self.db), self.owner, at)

    async def _end_turn(self, no: int, kind: str, segments) -> None:
        token = f"t{next(self.tokens)}"
        attempt = await steps.begin(self.db, self.owner, no, kind, None, token=token, stopping=True)
        self._may_crash()
        output = {"outcome": "interrupted", "text": "", "kv_tokens": no}
        await self._complete(attempt, segments, output, Move.REST, think=kind == "think")

    async def _behind(self, attempt) -> Past:
        """What the node kept of the step before is what the record says, whatever happened meanwhile."""
        what = StepIn(self.session_id, attempt.session.epoch, attempt.step_no)
        kept, read = await past(self.db, self.recent, what), await past(self.db, Recent(), what)
        assert replace(kept, session=None) == read
        self.kept_ones += kept.session is not None
        return kept

    async def _complete(self, attempt, segments, output, to, think=False) -> None:
        behind = await self._behind(attempt)
        before = behind.tokens
        durable = await self._durable(attempt.step_no)
        after = [*before, *(t for s in (*durable, *segments) for t in s.token_ids)]
        checkpoint = Checkpoint(len(after), digest(after), "f", None, [], "")
        about = {"segments": segments, "output": output, "checkpoint": checkpoint, "to": to}
        if self.chance.random() < 0.1:  # the node stands still here, and goes on when the world has moved
            self.zombies.append((self.owner, attempt, about))
            raise Crash
        ended = await steps.complete(self.db, self.owner, attempt, **about)
        assert ended.standing == await standing.standing(self.db, self.session_id)
        if ended.mine:
            known, said = (output["kv_tokens"], output) if think else (None, None)
            whole = behind.after(attempt.session, checkpoint, after, known, said)
            self.recent.keep(self.session_id, attempt.session.epoch, attempt.step_no, whole)
        self._may_crash()

    async def wake(self) -> None:
        """Nodes that stood still write what they were about to write."""
        for owner, attempt, about in self.zombies:
            with contextlib.suppress(StaleEpoch):
                await steps.complete(self.db, owner, attempt, **about)
        self.zombies.clear()

    async def _durable(self, no: int):
        return await self.db.run(lambda c: steps._segments_of(c, self.session_id, no))

    def _may_crash(self) -> None:
        if self.chance.random() < 0.1:
            raise Crash

    async def at(self):
        return await self.db.run(lambda c: standing.progress(c, self.session_id))

    async def fork(self) -> None:
        """From any step that ever completed, and from the fork again."""
        if self.ended:
            at = self.chance.choice(sorted(self.ended))
            await branches.fork(self.db, TENANT, self.session_id, "ses_fork", at, None)
            await branches.fork(self.db, TENANT, "ses_fork", "ses_fork_of_it", None, None)
            for session_id in ("ses_fork", "ses_fork_of_it"):
                await check_record(self.db, session_id)

    async def end(self) -> None:
        """Complete it where that may be, with whatever is asked at the same time; else cancel it."""
        how = "cancelled"
        await self.ask()
        with contextlib.suppress(Conflict):
            await sessions.request_end(self.db, TENANT, self.session_id, "completed")
            how = "completed"
        await commands.apply(self.db, self.session_id)
        if how == "cancelled" or self.chance.random() < 0.5:
            await sessions.request_end(self.db, TENANT, self.session_id, "cancelled")
        await sessions.finish(self.db, self.session_id, how, {})
        await self.wake()
        assert await sessions.has_ended(self.db, self.session_id)
        assert not await self.db.fetch("SELECT 1 FROM commands WHERE state = 'accepted'")
        await self.check()

    # What must hold ------------------------------------------------------------------------------------------

    async def check(self) -> None:
        session = await sessions.get(self.db, self.session_id)
        rows = await self.db.fetch("SELECT * FROM steps WHERE session_id = $1 ORDER BY step_no", self.session_id)
        ended = {row["step_no"]: (row["kind"], row["output"]) for row in rows if row["state"] == "completed"}
        assert {no: ended.get(no) for no in self.ended} == self.ended, "a completed step stays as it is"
        self.ended = ended
        is_open = await self.db.fetch("SELECT 1 FROM questions WHERE state = 'open'")
        unapplied = await self.db.fetch("SELECT 1 FROM commands WHERE state = 'accepted'")
        if session.state == "waiting":
            assert is_open or unapplied, "it waits for something"
        else:
            assert not is_open or session.state == "paused", "what is asked is waited for"
        await check_record(self.db, self.session_id)
        live = [row for row in rows if row["live"] and row["state"] == "completed"]
        for step, then in itertools.pairwise(live):
            if step["kind"] == "think" and step["output"]["outcome"] == "tools":
                assert then["kind"] in ("tool", "decision", "input"), "calls have results before the next think"

    async def check_at_rest(self) -> None:
        """Nothing is left to do: the state must say why."""
        session, at = await sessions.get(self.db, self.session_id), await self.at()
        assert session.state in ("created", "idle", "waiting", "paused", "failed", "provisioning")
        if session.state == "idle":
            assert next_action(at) is Next.REST
            assert at.unread == 0
            assert not await self.db.fetch("SELECT 1 FROM steps WHERE state = 'running'")


def digest(tokens) -> bytes:
    return hashlib.sha256(array("I", tokens).tobytes()).digest()


async def check_record(db, session_id: str) -> None:
    """The transcript is what the newest checkpoint names, and events have no gaps."""
    tokens = await steps.transcript(db, session_id, 10**6)
    last = await db.fetchrow(
        "SELECT token_count, token_digest FROM checkpoints WHERE session_id = $1 ORDER BY step_no DESC LIMIT 1",
        session_id,
    )
    assert (len(tokens), digest(tokens)) == ((last["token_count"], last["token_digest"]) if last else (0, digest([])))
    rows = await db.fetch("SELECT pos FROM events WHERE session_id = $1 ORDER BY pos", session_id)
    assert [row["pos"] for row in rows] == list(range(1, len(rows) + 1))


async def walk(db, seed: int, moves: int) -> Walker:
    walker = Walker(db, random.Random(seed))
    await walker.start()
    await walker.message()
    for _ in range(moves):
        what = walker.chance.random()
        if what < 0.55:
            await walker.go_on()
        elif what < 0.7:
            await walker.ask()
        elif what < 0.85:
            await walker.answer()
        elif what < 0.87:
            walker.owner = None
        elif what < 0.9:
            await walker.wake()
        else:
            await walker.message()
        await walker.check()
    for _ in range(200):
        if not await walker.go_on():
            break
        await walker.check()
    else:
        raise AssertionError("it never comes to rest")
    await walker.check_at_rest()
    await walker.fork()
    await walker.end()
    return walker


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_in_whatever_order_the_record_is_at_one_with_itself_and_nothing_is_stuck(db, seed):
    walker = await walk(db, seed, 60)
    assert walker.kept_ones, "some steps follow the one before them on the same node"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 140))
async def test_long_walks_too(db, seed):
    await walk(db, seed, 300)
