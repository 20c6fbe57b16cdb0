"""One session of the faults bench: the demo's story with faults at its named moments, and every raw fact about it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import tenuto

from bench.evidence import Line
from bench.faults_plan import TOOL_S, Fault
from bench.faults_strike import Striker, Struck
from runtime.demo import story
from runtime.demo.play import marks, outside_log

T = TypeVar("T")
REST_S = 240.0  # a turn that has not ended by then is stuck
Watch = Callable[["Player", tenuto.Event], None]


def spec(seed: int) -> dict[str, Any]:
    return story.session(seed, 0.8, long_s=TOOL_S[1], short_s=TOOL_S[0])


async def stubborn(ask: Callable[[], Awaitable[T]]) -> T:
    """A request, made until the server takes it: what it says about its own state is no answer. All are idempotent."""
    while True:
        try:
            return await ask()
        except tenuto.ConnectionFailed:
            continue
        except tenuto.APIError as error:
            if error.status < 500:
                raise
        await asyncio.sleep(0.2)


class Player:
    """Plays one session. `line` is its evidence."""

    def __init__(
        self,
        client: tenuto.AsyncClient,
        striker: Striker,
        seed: int,
        faults: Sequence[Fault],
        *,
        outputs: Sequence[str] = (),
        watch: Watch = lambda player, event: None,
        rest_s: float = REST_S,
    ) -> None:
        """`outputs`: of the undisturbed run, for a person who is asked how a call ended."""
        self.client, self.striker, self.seed = client, striker, seed
        self.session_id = ""
        self.line: Line = {"kind": "session" if faults else "calm", "seed": seed, "stuck": False}
        self._waiting = list(faults)
        self._calm_outputs = outputs
        self._watch = watch
        self._rest_s = rest_s
        self._seen: list[list[Any]] = []  # id, type, step
        self._deltas: dict[int, list[list[Any]]] = {}  # step -> offset, token ids
        self._outputs: list[str] = []
        self._failures: list[str] = []
        self._unknown: list[str] = []  # calls whose outcome was asked for, by key
        self._tells: list[dict[str, Any]] = []
        self._acknowledged: list[str] = []
        self._count = dict.fromkeys(("think", "tool", "between"), 0)
        self._later: list[asyncio.Task[None]] = []
        self._open: list[Struck] = []

    async def play(self) -> Line:
        create_key = secrets.token_hex(8)
        session = await stubborn(lambda: self.client.sessions.create(**spec(self.seed), idempotency_key=create_key))
        self.session_id = self.line["session"] = session.id
        try:
            async with asyncio.timeout(self._rest_s):
                await self._turn(session, story.MESSAGE)
            await self._while_idle()
            async with asyncio.timeout(self._rest_s):
                await self._turn(session, story.FOLLOW_UP)
        except TimeoutError:
            self.line["stuck"] = True
        await asyncio.gather(*self._later)
        await self._look(session)
        try:
            async with asyncio.timeout(self._rest_s):
                self.line["ended_as"] = await self._end(session)
        except TimeoutError:
            self.line |= {"stuck": True, "ended_as": "not at all"}
        return self.line

    async def _turn(self, session: tenuto.AsyncSession, message: dict[str, Any]) -> None:
        key = secrets.token_hex(8)
        turn = tenuto.TurnReader(await stubborn(lambda: session.send(**message, idempotency_key=key)))
        self._acknowledged.append(turn._message_id)
        while not turn.done:
            with contextlib.suppress(tenuto.ConnectionFailed):
                async with contextlib.aclosing(session.stream(self._seen[-1][0] if self._seen else 0)) as events:
                    async for event in events:
                        turn.feed(event)
                        self._feed(event)
                        if turn.done:
                            break

    async def _end(self, session: tenuto.AsyncSession) -> str:
        while True:
            info = await stubborn(lambda: session.cancel(wait=False))
            if info.state in ("cancelled", "completed"):
                return info.state
            await asyncio.sleep(0.2)

    async def _look(self, session: tenuto.AsyncSession) -> None:
        """What the record says of it now, beside what was seen."""
        again = await stubborn(session.events)
        segments = (await stubborn(lambda: self.client.get(f"/v1/sessions/{session.id}/transcript")))["data"]
        checkpoints = await stubborn(session.checkpoints)
        inside, outside = marks(self.striker.bed.stack, session.id, checkpoints) if checkpoints else ([], [])
        self.line |= {
            "acknowledged": self._acknowledged,
            "seen": self._seen,
            "again": [[e.id, e.type, e.step] for e in again],
            "consumed": [e.data["message_id"] for e in again if e.type == "step.completed" and "message_id" in e.data],
            "deltas": sorted(self._deltas.items()),
            "transcript": [[one["step"], one["kind"], one["token_ids"]] for one in segments],
            "checkpoints": [one["id"] for one in checkpoints],
            "outputs": self._outputs,
            "failures": self._failures,
            "unknown": self._unknown,
            "inside": inside,
            "outside": outside,
            "tells": self._tells if self._failures or self.line["stuck"] else [],
        }

    # --- moments ---------------------------------------------------------------------------------------------------

    def _feed(self, event: tenuto.Event) -> None:
        self._watch(self, event)
        self._note(event)
        self._recovered(event)
        for moment, after in self._moments(event):
            for fault in list(self._waiting):
                if fault.moment == moment and fault.nth == self._nth(moment):
                    if moment != "think":
                        self._waiting.remove(fault)
                        self._later.append(asyncio.create_task(self._strike(fault, fault.after)))
                    elif after >= fault.after:
                        self._waiting.remove(fault)
                        self._later.append(asyncio.create_task(self._strike(fault, 0.0)))

    def _note(self, event: tenuto.Event) -> None:
        self._seen.append([event.id, event.type, event.step])
        if event.type == "model.delta":
            assert event.step is not None
            self._deltas.setdefault(event.step, []).append([event.data["offset"], event.data["token_ids"]])
            return
        self._tells.append({"id": event.id, "type": event.type, "step": event.step, "data": str(event.data)[:300]})
        if event.type == "tool.settled":
            self._outputs.append(event.data["preview"])
        elif event.type == "session.failed":
            self._failures.append(event.data["message"])
        elif event.type == "tool.outcome_unknown":
            self._later.append(
                asyncio.create_task(self._answer(f"{self.session_id}/{event.step}/{event.data['call']}"))
            )

    def _moments(self, event: tenuto.Event) -> list[tuple[str, float]]:
        """The named moments that an event stands for, and how far into it the session is."""
        if event.type == "step.started" and event.data["kind"] in self._count:
            self._count[event.data["kind"]] += 1
        if event.type == "checkpoint.created":
            self._count["between"] += 1
            return [("between", 0.0)]
        if event.type == "model.delta":
            return [("think", float(event.data["offset"] + len(event.data["token_ids"])))]
        if event.type == "tool.started":
            return [("tool", 0.0), ("snapshot", 0.0)]
        return [("restore", 0.0)] if event.type == "tool.settled" else []

    def _nth(self, moment: str) -> int:
        return self._count["tool" if moment in ("snapshot", "restore") else moment]

    async def _while_idle(self) -> None:
        for fault in [fault for fault in self._waiting if fault.moment == "idle"]:
            self._waiting.remove(fault)
            await self._strike(fault, fault.after)

    async def _answer(self, key: str) -> None:
        """Be the person who finds out whether an unsafe call took effect: by its mark outside."""
        self._unknown.append(key)
        log = outside_log(self.striker.bed.stack, self.session_id)
        ran = log.exists() and key in log.read_text().split()
        more = {"output": self._calm_outputs[self._count["tool"] - 1]} if ran else {}
        session = await stubborn(lambda: self.client.sessions.get(self.session_id))
        for question in await stubborn(session.questions):
            with contextlib.suppress(tenuto.APIError):  # the answer to an answer was lost: it holds
                await stubborn(partial(self.client.answer, question.id, "ran" if ran else "did_not_run", **more))

    async def _strike(self, fault: Fault, after_s: float) -> None:
        await asyncio.sleep(after_s)
        struck = await self.striker.strike(fault, self.session_id)
        if struck is not None:
            self._open.append(struck)

    def _recovered(self, event: tenuto.Event) -> None:
        """The first event that is younger than a fault says that the session goes on."""
        for struck in [one for one in self._open if event.created_at.timestamp() > one["struck_at"]]:
            struck["recovered_s"] = time.time() - struck["struck_at"]
            self._open.remove(struck)
