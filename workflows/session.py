"""The session workflow: decides and schedules, carries references only.

A run may end at any step boundary (continue-as-new) or be lost altogether: `place` reads the record in Postgres
and says where to go on, so a fresh run continues at the step that was not completed.
"""

from __future__ import annotations

import asyncio
import builtins
import itertools
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    TimeoutError,
    TimeoutType,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from workflows import contract
    from workflows.contract import (
        ApplyIn,
        FailIn,
        FinishIn,
        InputIn,
        PlaceIn,
        Placement,
        Progress,
        SessionState,
        StepIn,
        StepOut,
        ThinkIn,
    )
    from workflows.policies import (
        MAX_LOSSES,
        MAX_UPDATES,
        SEEN_KEPT,
        Next,
        ends_as,
        may_go_on,
        next_action,
        pause_after_loss,
        stops,
        tool_choice_now,
    )

_ONCE = RetryPolicy(maximum_attempts=1)
_KEEP_TRYING = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=5))
# A node that is lost is noticed by its heartbeat; a step may take as long as its slowest tool or child session.
_START_TO_CLOSE = timedelta(hours=24)
_HEARTBEAT = timedelta(seconds=5)
# Two seconds gave false host losses under load; ten did not.
_SCHEDULE_TO_START = timedelta(seconds=10)


class _Refused(Exception):
    """The step cannot be done as asked; the session fails with this message."""


@workflow.defn(name="Session")
class SessionWorkflow:
    @workflow.init
    def __init__(self, state: SessionState) -> None:
        self.state = state
        self._running: asyncio.Task[Any] | None = None
        self._activity = ""  # the step's activity that runs now
        self._stopped = False  # what ran was cancelled to make way for a command
        self._lost = ""  # the queue that lost the last step
        self._more = False  # commands wait behind the change of the workspace that was made last
        self._known = state.placement.epoch if state.placement else 0

    @workflow.run
    async def run(self, state: SessionState) -> str:
        if self.state.placement is None and not self.state.ending:
            await self._guarded(self._place())
        while not self.state.ending:
            await self._guarded(self._advance())
            await self._until_there_is_work()
            if self._run_is_long() and not self.state.ending:
                await workflow.wait_condition(workflow.all_handlers_finished)
                self.state.updates = 0
                workflow.continue_as_new(
                    self.state, initial_versioning_behavior=workflow.ContinueAsNewVersioningBehavior.AUTO_UPGRADE
                )
        await self._finish()
        await workflow.wait_condition(workflow.all_handlers_finished)
        return self.state.ending

    # What other processes say to the session -------------------------------------------------------------

    @workflow.update
    async def deliver(self, message_id: str, interrupt: bool = False) -> bool:
        """Queue an accepted message. The update's id is the message's id; a repeat is a no-op (False).

        `interrupt`: end what runs, keeping what it has so far, and take the message next.
        """
        self.state.updates += 1
        if not self._is_new(message_id):
            return False
        self.state.inbox.append(message_id)
        if interrupt:
            self.state.interrupt = True
            self._stop_for("interrupt")
        return True

    @deliver.validator
    def _refuse_when_ending(self, message_id: str, interrupt: bool = False) -> None:
        if self.state.ending:
            raise ValueError(f"the session is being {self.state.ending}; it takes no more messages")

    @workflow.update
    async def command(self, command_id: str, verb: str) -> bool:
        """An accepted command waits in the record; apply it at the next boundary, or at once where it stops things."""
        self.state.updates += 1
        if self.state.ending or not self._is_new(command_id):
            return False
        self.state.commands.append(command_id)
        self.state.interrupt = self.state.interrupt or verb == "interrupt"
        self._stop_for(verb)
        return True

    @workflow.update
    async def end(self, how: str) -> str:
        """Cancel or complete: whatever runs is cancelled first. Idempotent."""
        self.state.updates += 1
        if not self.state.ending:
            self.state.ending = how
            if self._running is not None:
                self._running.cancel()
        return self.state.ending

    @workflow.signal
    def leave(self, queue: str) -> None:
        """The node of this queue hands its sessions over: the next step is placed anew."""
        if self.state.placement is not None and self.state.placement.queue == queue:
            self.state.placement = None

    @workflow.signal
    def look(self) -> None:
        """Look around: a session that rests sees only then that there is a newer version of this code."""

    @workflow.query
    def status(self) -> dict[str, Any]:
        placement, progress = self.state.placement, self.state.progress
        return {
            "step_no": progress.step_no,
            "next": str(next_action(progress)),
            "node": placement.node_id if placement else None,
            "epoch": placement.epoch if placement else 0,
            "inbox": len(self.state.inbox),
            "ending": self.state.ending,
            "hold": progress.hold,
        }

    def _is_new(self, delivery_id: str) -> bool:
        if delivery_id in self.state.seen:
            return False
        self.state.seen = [*self.state.seen, delivery_id][-SEEN_KEPT:]
        return True

    def _stop_for(self, verb: str) -> None:
        if self._running is not None and self._activity and stops(verb, self._activity):
            self._stopped = True
            self._running.cancel()

    # One step after the other ----------------------------------------------------------------------------

    def _has_work(self) -> bool:
        state = self.state
        asked = state.ending or state.commands or state.interrupt or state.alters
        return bool(asked or (self._has_message() and may_go_on(state.progress, True)))

    def _has_message(self) -> bool:
        return bool(self.state.inbox or self.state.progress.unread)

    async def _until_there_is_work(self) -> None:
        """Wait; what the session waits for may expire, which the record decides."""
        until = self.state.wake_at or self.state.progress.hold_until
        left = timedelta(seconds=max(0.0, until - workflow.time())) if until else None
        try:
            await workflow.wait_condition(lambda: self._has_work() or self._run_is_long(), timeout=left)
        except builtins.TimeoutError:
            self.state.commands.append("expiry")

    def _read(self, progress: Progress) -> None:
        """Where the record stands. Its clock is not ours: what expires does so as long from now as it says."""
        self.state.progress = progress
        self.state.wake_at = workflow.time() + progress.hold_left_s if progress.hold_left_s else 0.0

    def _end_if_ended(self) -> None:
        """A run that was started for a session that ended meanwhile has nothing to wait for."""
        self.state.ending = self.state.ending or ends_as(self.state.progress)

    def _run_is_long(self) -> bool:
        info = workflow.info()
        return (
            info.get_current_history_length() > self.state.max_events
            or info.is_continue_as_new_suggested()
            or self.state.updates > MAX_UPDATES
            or info.is_target_worker_deployment_version_changed()
        )

    async def _guarded(self, work: Awaitable[None]) -> None:
        """Run until it is done, refused (the session fails, and lives on) or cancelled by `end` or a command."""
        self._running = asyncio.ensure_future(work)
        try:
            await self._running
        except _Refused as refusal:
            failed: StepOut = await self._anywhere(contract.FAIL, FailIn(self.state.session_id, str(refusal)), StepOut)
            self._read(failed.progress)
        except BaseException as error:
            asked = self.state.ending or self._stopped
            if not (asked and (is_cancelled_exception(error) or isinstance(error, asyncio.CancelledError))):
                raise
        finally:
            self._running = None
            self._stopped = False

    async def _advance(self) -> None:
        """Steps until the session rests and its inbox is empty, something holds it, or the run has grown long."""
        while not self.state.ending and not self._run_is_long():
            if self.state.interrupt:
                await self._interrupt()
            elif self.state.commands:
                await self._apply()
            elif self.state.alters:
                await self._alter()
            elif not may_go_on(self.state.progress, self._has_message()) or not await self._next_step():
                return

    async def _next_step(self) -> bool:
        """False: there is none."""
        session_id = self.state.session_id
        action = next_action(self.state.progress)
        if action is Next.REST or self.state.progress.hold:
            if not self._has_message():
                return False
            await self._take_input()
        elif action is Next.THINK:
            await self._step(
                contract.THINK,
                lambda epoch, n: ThinkIn(
                    session_id, epoch, n, tool_choice_now(self.state.progress), self.state.progress.corrections
                ),
            )
        elif action is Next.COMPACT:
            await self._step(contract.COMPACT, lambda epoch, n: StepIn(session_id, epoch, n))
        else:
            await self._step(contract.RUN_TOOLS, lambda epoch, n: StepIn(session_id, epoch, n))
        return True

    async def _interrupt(self) -> None:
        """End what runs or would run next, keeping what there is of it."""
        session_id = self.state.session_id
        await self._step(contract.INTERRUPT, lambda epoch, n: StepIn(session_id, epoch, n))
        self.state.interrupt = False

    async def _apply(self, gave_up: str = "") -> None:
        taken = list(self.state.commands)
        applied: StepOut = await self._anywhere(contract.APPLY, ApplyIn(self.state.session_id, gave_up), StepOut)
        self.state.commands = [one for one in self.state.commands if one not in taken]
        self.state.alters = applied.alters
        self._read(applied.progress)
        self._end_if_ended()
        self.state.interrupt = self.state.interrupt or applied.interrupt
        if applied.moved:
            self.state.placement = None
            self._known = 0

    async def _alter(self) -> None:
        """Change the workspace as was asked, where it is. What cannot be done at any node is refused, and no more: the
        session is as it was."""
        session_id = self.state.session_id
        try:
            made = await self._step(contract.ALTER, lambda epoch, n: StepIn(session_id, epoch, n))
        except _Refused as refusal:
            await self._apply(str(refusal))
            return
        if made:
            self.state.alters = False
            if self._more:
                self.state.commands.append("behind")

    async def _take_input(self) -> None:
        """Take the oldest message; the id only says that there is one."""
        session_id, before = self.state.session_id, self.state.progress.step_no
        message_id = self.state.inbox[0] if self.state.inbox else ""
        try:
            taken = await self._step(contract.TAKE_INPUT, lambda epoch, n: InputIn(session_id, epoch, n, message_id))
        except _Refused:
            self._forget(message_id)  # it was answered with its error; do not take it again
            raise
        progress = self.state.progress
        if taken and progress.full and progress.step_no == before:  # room must be made for it first
            await self._step(contract.COMPACT, lambda epoch, n: StepIn(session_id, epoch, n))
        elif taken and progress.hold in ("", "failed"):  # a failed session that took it is failed no longer
            self._forget(message_id)

    def _forget(self, message_id: str) -> None:
        if message_id in self.state.inbox:
            self.state.inbox.remove(message_id)

    async def _step(self, name: str, make_input: Callable[[int, int], Any]) -> bool:
        """The next step, on the node that holds the session; a lost node costs a new placement, not the step.

        True: it is completed, by this attempt or by a lost one that got that far. False: the record had gone on
        further than we knew, or the step was lost and is not begun again before what was asked meanwhile. A step that
        is lost again and again is refused after MAX_LOSSES.
        """
        step_no, ending_it = self.state.progress.step_no + 1, name == contract.INTERRUPT
        for losses in itertools.count(1):
            if self.state.placement is None:
                await self._place()
                if self.state.progress.step_no >= step_no and not ending_it:  # where it stands is for the record to say
                    return self.state.progress.step_no == step_no
            if self.state.ending or ((self.state.interrupt or self.state.commands) and not ending_it):
                return False
            home = self.state.placement
            assert home is not None
            self._activity = name
            try:
                out: StepOut = await workflow.execute_activity(
                    name,
                    make_input(home.epoch, step_no),
                    task_queue=home.queue,
                    schedule_to_start_timeout=_SCHEDULE_TO_START,
                    start_to_close_timeout=_START_TO_CLOSE,
                    heartbeat_timeout=_HEARTBEAT,
                    cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                    retry_policy=_ONCE,
                    result_type=StepOut,
                )
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                _raise_unless_lost(error)
                if losses == MAX_LOSSES:
                    raise _Refused(f"the step was lost {losses} times, the last time with: {error.cause}") from error
                workflow.logger.warning("session %s leaves %s: %s", self.state.session_id, home.queue, error.cause)
                self.state.placement = None
                self._lost = home.queue
                await workflow.sleep(pause_after_loss(losses, _asked_s(error)))
                continue
            finally:
                self._activity = ""
            self._read(out.progress)
            self._more = out.alters
            return True
        raise AssertionError("unreachable")

    async def _place(self) -> None:
        """Choose a node, raise the epoch, and read where the record stands."""
        asked = PlaceIn(self.state.session_id, self._lost, self._known)
        placement: Placement = await self._anywhere(contract.PLACE, asked, Placement)
        self.state.placement = placement
        self._known = placement.epoch
        self._read(placement.progress)
        self._end_if_ended()

    async def _finish(self) -> None:
        """Free everything that the session holds. Never cancelled: it runs until it is true."""
        await self._anywhere(contract.FINISH, FinishIn(self.state.session_id, self.state.ending), None)

    async def _anywhere(self, name: str, argument: Any, result_type: Any) -> Any:
        try:
            return await workflow.execute_activity(
                name,
                argument,
                task_queue=contract.NODES_QUEUE,
                start_to_close_timeout=timedelta(minutes=2),
                heartbeat_timeout=_HEARTBEAT,
                cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                retry_policy=_KEEP_TRYING,
                result_type=result_type,
            )
        except ActivityError as error:
            if isinstance(error.cause, ApplicationError) and error.cause.type == contract.ErrorType.REFUSED:
                raise _Refused(error.cause.message) from error
            raise


def _asked_s(error: ActivityError) -> float:
    """Seconds that whoever was busy asked for; 0 where nobody did."""
    cause = error.cause
    asked = cause.details[0] if isinstance(cause, ApplicationError) and cause.details else 0.0
    return float(asked) if isinstance(asked, int | float) and asked > 0 else 0.0


def _raise_unless_lost(error: ActivityError) -> None:
    """Return if the node or engine is gone and another placement helps; otherwise raise what the session fails with."""
    cause = error.cause
    if isinstance(cause, TimeoutError):
        if cause.type in (TimeoutType.SCHEDULE_TO_START, TimeoutType.HEARTBEAT):
            return
        raise _Refused("the step did not end within 24 hours") from error
    if isinstance(cause, ApplicationError):
        if cause.type == contract.ErrorType.REFUSED:
            raise _Refused(cause.message) from error
        return  # also what nobody raised on purpose: tried again elsewhere, MAX_LOSSES times
    raise error
