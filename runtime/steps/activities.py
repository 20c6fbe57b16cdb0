"""Activities by name. Each opens an attempt, does its work in a module of its own, and ends in a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from temporalio import activity

from runtime.steps import (
    altering,
    closing,
    compacting,
    errands,
    firing,
    inputs,
    interrupting,
    placing,
    sending,
    thinking,
    tooling,
)
from runtime.steps.errors import told_to_the_workflow
from runtime.steps.measuring import measure
from runtime.steps.services import Services
from runtime.store import alterations, commands, sessions, standing
from runtime.store.standing import Standing
from workflows import contract
from workflows.contract import (
    ApplyIn,
    DeliveryIn,
    DeliveryOut,
    ErrandIn,
    FailIn,
    FinishIn,
    FiringIn,
    InputIn,
    PlaceIn,
    Placement,
    Progress,
    RunOut,
    StepIn,
    StepOut,
    ThinkIn,
)

HEARTBEAT_EVERY_S = 0.5


class Steps:
    """The node's activities. `all()` is what a Temporal worker registers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def anywhere(self) -> list[Callable[..., Any]]:
        """Activities that any node may take, from the common queue."""
        return [
            *(self.place, self.apply, self.fail, self.finish),
            *(self.send_webhook, self.fire, self.look_at_run, self.cancel_run),
        ]

    def at_home(self) -> list[Callable[..., Any]]:
        """Activities of the node that holds the session, from its own queue."""
        return [
            self.take_input,
            self.think,
            self.run_tools,
            self.compact,
            self.interrupt,
            self.alter,
            self.errand,
        ]

    @activity.defn(name=contract.PLACE)
    @told_to_the_workflow
    async def place(self, what: PlaceIn) -> Placement:
        """Choose the session's node; say where its record stands. One that has ended is left alone."""
        async with heartbeats():
            if await sessions.has_ended(self._services.db, what.session_id):
                return Placement("", "", 0, await self._progress(what.session_id))
            home = await placing.place(self._services, what)
            return Placement(home.node_id, home.queue, home.epoch, await self._progress(what.session_id))

    @activity.defn(name=contract.TAKE_INPUT)
    @told_to_the_workflow
    async def take_input(self, what: InputIn) -> StepOut:
        async with heartbeats():
            taken = await inputs.take(self._services, what, execution())
            progress = await self._progress(what.session_id, taken.standing)
            return StepOut(progress if taken.fits else replace(progress, full=True))

    @activity.defn(name=contract.THINK)
    @told_to_the_workflow
    async def think(self, what: ThinkIn) -> StepOut:
        async with heartbeats():
            return await self._out(what, await thinking.think(self._services, what, execution()))

    @activity.defn(name=contract.RUN_TOOLS)
    @told_to_the_workflow
    async def run_tools(self, what: StepIn) -> StepOut:
        async with heartbeats():
            return await self._out(what, await tooling.run_tools(self._services, what, execution()))

    @activity.defn(name=contract.COMPACT)
    @told_to_the_workflow
    async def compact(self, what: StepIn) -> StepOut:
        async with heartbeats():
            await compacting.compact(self._services, what, execution())
            return StepOut(await self._progress(what.session_id))

    @activity.defn(name=contract.INTERRUPT)
    @told_to_the_workflow
    async def interrupt(self, what: StepIn) -> StepOut:
        async with heartbeats():
            await interrupting.interrupt(self._services, what, execution())
            return StepOut(await self._progress(what.session_id))

    @activity.defn(name=contract.ALTER)
    @told_to_the_workflow
    async def alter(self, what: StepIn) -> StepOut:
        """Changes of the workspace that were asked for from outside, up to the first command of another kind."""
        async with heartbeats():
            more = await altering.alter(self._services, what)
            return StepOut(await self._progress(what.session_id), alters=more)

    @activity.defn(name=contract.ERRAND)
    @told_to_the_workflow
    async def errand(self, what: ErrandIn) -> None:
        async with heartbeats():
            await errands.run(self._services, what.errand_id)

    @activity.defn(name=contract.APPLY)
    async def apply(self, what: ApplyIn) -> StepOut:
        """Commands, answers and expired questions: what the record says is done to the session's state."""
        async with heartbeats():
            if what.gave_up:
                await alterations.refuse_next(self._services.db, what.session_id, what.gave_up)
            applied = await commands.apply(self._services.db, what.session_id, asked_by())
            progress = await self._progress(what.session_id)
            return StepOut(progress, applied.moved, applied.interrupt, applied.alters)

    # The last two are tried until they are done: there is nobody left to tell.

    @activity.defn(name=contract.FAIL)
    async def fail(self, what: FailIn) -> StepOut:
        await sessions.fail(self._services.db, what.session_id, what.message)
        return StepOut(await self._progress(what.session_id))

    @activity.defn(name=contract.FINISH)
    async def finish(self, what: FinishIn) -> None:
        async with heartbeats():
            await closing.finish(self._services, what)

    @activity.defn(name=contract.SEND_WEBHOOK)
    async def send_webhook(self, what: DeliveryIn) -> DeliveryOut:
        return await sending.send(self._services, what)

    @activity.defn(name=contract.FIRE)
    async def fire(self, what: FiringIn) -> RunOut:
        return await firing.fire(self._services, what)

    @activity.defn(name=contract.LOOK_AT_RUN)
    async def look_at_run(self, what: FiringIn) -> RunOut:
        return await firing.look(self._services, what)

    @activity.defn(name=contract.CANCEL_RUN)
    async def cancel_run(self, what: FiringIn) -> RunOut:
        return await firing.cancel(self._services, what)

    async def _out(self, what: StepIn | ThinkIn, ended: Standing | None) -> StepOut:
        return StepOut(await self._progress(what.session_id, ended))

    async def _progress(self, session_id: str, ended: Standing | None = None) -> Progress:
        """`ended`: as a step left it that has just ended; else the record is asked."""
        s = self._services
        at = ended or await standing.standing(s.db, session_id)
        measured = await measure(s, session_id)
        return replace(at.progress, full=compacting.is_full(measured, at.config, at.tokens, at.progress))


def execution() -> str:
    """A name for this execution of the activity, so that a write repeated within it is seen as one."""
    return f"{asked_by()}/{activity.info().attempt}"


def asked_by() -> str:
    """A name for the activity, however often it is tried."""
    info = activity.info()
    return f"{info.workflow_run_id}/{info.activity_id}"


@contextlib.asynccontextmanager
async def heartbeats() -> AsyncIterator[None]:
    """Tell Temporal that this attempt lives, whatever the work waits for. Cancellation arrives the same way.

    Most steps are over before there is anything to tell: a heartbeat that is under way holds up the completion.
    """

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_EVERY_S)
            activity.heartbeat()

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
