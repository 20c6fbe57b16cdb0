"""The workflow on a real Temporal server, with activities that record what they were asked.

Not on the time-skipping server: there an update that arrives while a workflow task is out can be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from workflows.contract import (
    NODES_QUEUE,
    ApplyIn,
    ErrorType,
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
from workflows.policies import MAX_LOSSES
from workflows.session import SessionWorkflow

TEMPORAL = Path(sys.prefix) / "bin" / "temporal"


class House:
    """A node with a memory: each step is done once, and what was asked is kept in `log`."""

    def __init__(self, rounds: int = 1) -> None:
        self.rounds = rounds
        self.log: list[tuple[object, ...]] = []
        self.progress = Progress()
        self.epoch = 0
        self.known: list[int] = []  # epochs with which a placement was asked for
        self.lose: dict[int, list[str]] = {}  # step: error types to raise first
        self.refuse: set[int] = set()
        self.lose_after: set[int] = set()  # steps that complete, and whose answer is lost with the node
        self.interrupts_lost = 0  # that do their work, and whose answer is lost with the node
        self.takes = True  # there is a message to take
        self.hold = asyncio.Event()
        self.hold.set()
        self.losing = asyncio.Event()  # a step that will be lost is so now
        self.losing.set()
        self.entered = asyncio.Event()
        self.stepped = asyncio.Event()
        self.queue = f"node-{uuid.uuid4().hex}"
        self.commands: list[tuple[dict[str, object], bool]] = []  # what each command does to the progress

    @activity.defn(name="place")
    async def place(self, what: PlaceIn) -> Placement:
        self.epoch += 1
        self.known.append(what.known)
        self.log.append(("place", self.epoch))
        return Placement("n", self.queue, self.epoch, self.progress)

    @activity.defn(name="take_input")
    async def take_input(self, what: InputIn) -> StepOut:
        if not self.takes:
            self.log.append(("nothing to take", what.step_no))
            self.stepped.set()
            return StepOut(self.progress)
        self._enter("input", what.step_no, what.message_id)
        self.progress = Progress(what.step_no, "input", "input", 0, "required", self.rounds)
        return self._leave(what.step_no)

    @activity.defn(name="think")
    async def think(self, what: ThinkIn) -> StepOut:
        if self.lose.get(what.step_no):
            self.log.append(("losing", what.step_no))
            self.stepped.set()
            with contextlib.suppress(asyncio.CancelledError):  # a dead node hears of nothing
                while not self.losing.is_set():
                    activity.heartbeat()
                    await asyncio.sleep(0.02)
        self._enter("think", what.step_no, what.tool_choice)
        self.entered.set()
        try:
            while not self.hold.is_set():
                activity.heartbeat()
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.log.append(("stopped", what.step_no))
            raise
        outcome = "tools" if what.tool_choice == "required" else "final"
        self.progress = replace(self.progress, step_no=what.step_no, kind="think", outcome=outcome)
        return self._leave(what.step_no)

    @activity.defn(name="run_tools")
    async def run_tools(self, what: StepIn) -> StepOut:
        self._enter("tools", what.step_no)
        rounds = self.progress.rounds + 1
        self.progress = replace(self.progress, step_no=what.step_no, kind="tool", outcome="settled", rounds=rounds)
        return self._leave(what.step_no)

    @activity.defn(name="fail")
    async def fail(self, what: FailIn) -> StepOut:
        self.log.append(("fail", what.message))
        no = self.progress.step_no + 1
        self.progress = replace(self.progress, step_no=no, kind="failed", outcome="", hold="failed")
        self.stepped.set()
        return StepOut(self.progress)

    @activity.defn(name="apply")
    async def apply(self, what: ApplyIn) -> StepOut:
        """What a command leads to is said by the test."""
        self.log.append(("apply",))
        changes, moved = self.commands.pop(0) if self.commands else ({}, False)
        self.progress = replace(self.progress, **changes)
        self.stepped.set()
        return StepOut(self.progress, moved)

    @activity.defn(name="interrupt")
    async def interrupt(self, what: StepIn) -> StepOut:
        self.log.append(("interrupt", what.step_no))
        self.progress = replace(self.progress, step_no=what.step_no, kind="think", outcome="interrupted")
        self.stepped.set()
        if self.interrupts_lost:
            self.interrupts_lost -= 1
            raise ApplicationError("gone", type=ErrorType.DRAINING)
        return StepOut(self.progress)

    @activity.defn(name="compact")
    async def compact(self, what: StepIn) -> StepOut:
        self.log.append(("compact", what.step_no))
        self.progress = replace(self.progress, step_no=what.step_no, full=False, compacted=True)
        return StepOut(self.progress)

    @activity.defn(name="finish")
    async def finish(self, what: FinishIn) -> None:
        self.log.append(("finish", what.how))

    def _enter(self, kind: str, step_no: int, *rest: object) -> None:
        if self.lose.get(step_no):
            error = self.lose[step_no].pop(0)
            self.log.append(("lost", step_no))
            raise ApplicationError("gone", type=error)
        if step_no in self.refuse:
            raise ApplicationError("too long for the context", type=ErrorType.REFUSED, non_retryable=True)
        self.log.append((kind, step_no, *rest))
        self.stepped.set()

    def _leave(self, step_no: int) -> StepOut:
        if step_no in self.lose_after:
            self.lose_after.remove(step_no)
            raise ApplicationError("gone", type=ErrorType.DRAINING)
        return StepOut(self.progress)

    def steps(self) -> list[tuple[object, ...]]:
        return [entry for entry in self.log if entry[0] in ("input", "think", "tools")]


@pytest.fixture(scope="module")
async def client():
    async with await WorkflowEnvironment.start_local(dev_server_existing_path=str(TEMPORAL)) as server:
        yield server.client


@pytest.fixture
async def running(client):
    """Start workers for a house; returns a function that starts a session in it."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(house: House, **state: object) -> WorkflowHandle:
            queue = f"sessions-{uuid.uuid4().hex}"
            # An exception in workflow code fails the workflow here; in production it is retried and alerts.
            options = {"workflow_failure_exception_types": [Exception]}
            await stack.enter_async_context(Worker(client, task_queue=queue, workflows=[SessionWorkflow], **options))
            home = [house.take_input, house.think, house.run_tools, house.compact, house.interrupt]
            await stack.enter_async_context(Worker(client, task_queue=house.queue, activities=home))
            anywhere = [house.place, house.apply, house.fail, house.finish]
            await stack.enter_async_context(Worker(client, task_queue=NODES_QUEUE, activities=anywhere))
            return await client.start_workflow(
                SessionWorkflow.run, SessionState("s", **state), id=f"session/{uuid.uuid4().hex}", task_queue=queue
            )

        yield start


async def end(handle: WorkflowHandle) -> None:
    await handle.execute_update(SessionWorkflow.end, "cancelled")
    assert await handle.result() == "cancelled"


async def logged(house: House, entry: tuple[object, ...], times: int = 1) -> None:
    """Wait until this was asked so often."""
    while house.log.count(entry) < times:
        house.stepped.clear()
        await house.stepped.wait()


async def rested(house: House, steps: int) -> None:
    """Wait until so many steps are done."""
    while len(house.steps()) < steps:
        house.stepped.clear()
        await house.stepped.wait()


async def test_a_message_leads_through_tool_rounds_to_an_answer_without_tools(running):
    house = House(rounds=2)
    handle = await running(house)
    assert await handle.execute_update(SessionWorkflow.deliver, "m1")
    await rested(house, 6)
    assert house.steps() == [
        ("input", 1, "m1"),
        ("think", 2, "required"),
        ("tools", 3),
        ("think", 4, "required"),
        ("tools", 5),
        ("think", 6, "none"),
    ]
    await end(handle)
    assert house.log[-1] == ("finish", "cancelled")


async def test_a_message_delivered_twice_is_taken_once(running):
    house = House(rounds=0)
    handle = await running(house)
    assert await handle.execute_update(SessionWorkflow.deliver, "m1")
    assert not await handle.execute_update(SessionWorkflow.deliver, "m1")
    await rested(house, 2)
    assert [entry for entry in house.log if entry[0] == "input"] == [("input", 1, "m1")]
    await end(handle)


async def test_two_messages_at_once_are_one_run_after_the_other(running):
    house = House(rounds=0)
    handle = await running(house)
    await asyncio.gather(*(handle.execute_update(SessionWorkflow.deliver, m) for m in ("a", "b")))
    await rested(house, 4)
    assert [entry[0] for entry in house.steps()] == ["input", "think", "input", "think"]
    await end(handle)


LOST = (ErrorType.ENGINE_LOST, ErrorType.SANDBOX_LOST, ErrorType.STALE_EPOCH, ErrorType.DRAINING, "KeyError")


@pytest.mark.parametrize("error", LOST)
async def test_a_lost_engine_costs_a_new_placement_and_no_finished_step(running, error):
    house = House(rounds=1)
    house.lose = {2: [error], 3: [error, error]}
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await rested(house, 4)
    assert house.steps() == [("input", 1, "m1"), ("think", 2, "required"), ("tools", 3), ("think", 4, "none")]
    assert house.epoch == 4
    await end(handle)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
async def test_a_step_whose_answer_was_lost_with_its_node_is_not_done_again(running, step):
    house = House(rounds=1)
    house.lose_after = {step}
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await rested(house, 4)
    await handle.execute_update(SessionWorkflow.deliver, "m2")
    await rested(house, 8)
    kinds = [(entry[0], entry[1]) for entry in house.steps()]
    assert kinds == [(kind, i + 1) for i, kind in enumerate(["input", "think", "tools", "think"] * 2)]
    await end(handle)


@pytest.mark.soak
async def test_a_step_that_is_lost_again_and_again_is_refused_and_not_tried_for_ever(running):
    house = House(rounds=0)
    house.lose = {2: [ErrorType.SANDBOX_LOST] * 1000}
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    while not any(entry[0] == "fail" for entry in house.log):
        await asyncio.sleep(0.1)
    assert house.log.count(("lost", 2)) == MAX_LOSSES
    assert f"lost {MAX_LOSSES} times" in next(str(entry[1]) for entry in house.log if entry[0] == "fail")
    await end(handle)


async def test_a_refused_step_fails_the_session_and_the_next_message_is_taken(running):
    house = House(rounds=0)
    house.refuse = {1}
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await handle.execute_update(SessionWorkflow.deliver, "m2")
    await rested(house, 2)
    assert ("fail", "too long for the context") in house.log
    assert house.steps() == [("input", 2, "m2"), ("think", 3, "none")]
    await end(handle)


async def test_cancel_stops_a_think_and_frees_everything_before_it_is_done(running):
    house = House(rounds=0)
    house.hold.clear()
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await house.entered.wait()
    await end(handle)
    assert house.log[-1] == ("finish", "cancelled")
    assert house.progress.kind == "input"


async def test_an_ending_session_refuses_messages_in_a_sentence(running):
    house = House(rounds=0)
    house.hold.clear()
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await house.entered.wait()
    await handle.execute_update(SessionWorkflow.end, "cancelled")
    with pytest.raises((WorkflowUpdateFailedError, RPCError)) as refused:  # it may have completed meanwhile
        await handle.execute_update(SessionWorkflow.deliver, "m2")
    told = str(refused.value.cause if isinstance(refused.value, WorkflowUpdateFailedError) else refused.value)
    assert "takes no more messages" in told or "completed" in told
    await handle.result()


async def test_a_placement_is_asked_for_with_the_epoch_of_the_last_one_that_was_heard_of(running):
    house = House(rounds=0)
    house.lose = {2: [ErrorType.ENGINE_LOST] * 2}
    house.commands = [({"step_no": 1, "kind": "input", "outcome": "input"}, True)]
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await rested(house, 2)
    await handle.execute_update(SessionWorkflow.command, args=["c1", "rewind"])
    await rested(house, 3)
    await end(handle)
    assert house.known == [0, 1, 2, 0], "whoever held a session that was rewound is fenced off in any case"


@pytest.mark.parametrize(("stands", "ends"), [("completed", "completed"), ("cancelled", "cancelled")])
async def test_a_run_that_a_late_message_starts_for_a_session_that_has_ended_ends_too(running, stands, ends):
    house = House()
    house.progress = Progress(4, "think", "final", hold=stands, unread=1)
    handle = await running(house)
    assert await handle.result() == ends
    assert house.steps() == []


async def test_a_session_that_is_cancelled_while_a_step_is_lost_ends_though_nobody_tells_its_workflow(running):
    house = House()
    house.losing.clear()
    house.lose = {2: [ErrorType.ENGINE_LOST]}
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await logged(house, ("losing", 2))
    house.progress = replace(house.progress, hold="cancelling")
    await handle.execute_update(SessionWorkflow.command, args=["c1", "interrupt"])
    house.losing.set()
    assert await handle.result() == "cancelled"
    assert ("interrupt", 2) not in house.log


@pytest.mark.parametrize("verb", ["pause", "interrupt"])
async def test_a_command_that_finds_that_its_session_has_ended_ends_its_workflow(running, verb):
    house = House()
    house.commands = [({"hold": "completed"}, False)]
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.command, args=["c1", verb])
    assert await handle.result() == "completed"


async def test_a_long_run_continues_as_new_and_repeats_nothing(running):
    house = House(rounds=3)
    handle = await running(house, max_events=20)
    for i in range(3):
        await handle.execute_update(SessionWorkflow.deliver, f"m{i}")
        await rested(house, 8 * (i + 1))
    numbers = [entry[1] for entry in house.steps()]
    assert numbers == list(range(1, 25))
    description = await handle.describe()
    assert description.run_id != handle.first_execution_run_id
    assert house.epoch == 1
    await end(handle)


async def test_a_workflow_that_was_lost_goes_on_at_the_step_that_was_not_completed(running):
    house = House(rounds=1)
    house.progress = Progress(7, "think", "tools", 0, "required", 1)
    handle = await running(house)
    await rested(house, 2)
    assert house.steps() == [("tools", 8), ("think", 9, "none")]
    await end(handle)


async def test_a_pause_stops_a_think_and_a_resume_begins_the_same_step_again(running):
    house = House(rounds=0)
    house.hold.clear()
    house.commands = [({"hold": "paused"}, False), ({"hold": ""}, False)]
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await house.entered.wait()
    await handle.execute_update(SessionWorkflow.command, args=["c1", "pause"])
    await logged(house, ("apply",))
    assert house.log[-2:] == [("stopped", 2), ("apply",)]
    house.hold.set()
    await handle.execute_update(SessionWorkflow.command, args=["c2", "resume"])
    await rested(house, 3)
    assert house.steps() == [("input", 1, "m1"), ("think", 2, "none"), ("think", 2, "none")]
    await end(handle)


async def test_a_command_sent_twice_is_applied_once(running):
    house = House(rounds=0)
    handle = await running(house)
    assert await handle.execute_update(SessionWorkflow.command, args=["c1", "resume"])
    assert not await handle.execute_update(SessionWorkflow.command, args=["c1", "resume"])
    await logged(house, ("apply",))
    await end(handle)
    assert house.log.count(("apply",)) == 1


async def test_messages_wait_while_the_session_is_held_and_are_taken_afterwards(running):
    house = House(rounds=0)
    house.commands = [({"hold": "approval"}, False), ({"hold": ""}, False)]
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.command, args=["c1", "pause"])
    await logged(house, ("apply",))
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await handle.execute_update(SessionWorkflow.command, args=["c2", "answer"])
    await rested(house, 2)
    assert house.steps() == [("input", 1, "m1"), ("think", 2, "none")]
    assert [entry[0] for entry in house.log].index("input") > house.log.index(("apply",))
    await end(handle)


async def test_a_message_may_interrupt_what_runs_and_is_taken_next(running):
    house = House(rounds=0)
    house.hold.clear()
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await house.entered.wait()
    await handle.execute_update(SessionWorkflow.deliver, args=["m2", True])
    await logged(house, ("interrupt", 2))
    house.hold.set()
    await rested(house, 4)
    assert house.steps() == [("input", 1, "m1"), ("think", 2, "none"), ("input", 3, "m2"), ("think", 4, "none")]
    await end(handle)


@pytest.mark.parametrize("asked", ["interrupt", "pause"])
async def test_what_was_asked_while_a_step_was_being_lost_comes_before_its_next_attempt(running, asked):
    house = House(rounds=0)
    house.commands = [({"hold": "paused" if asked == "pause" else ""}, False)]
    house.losing.clear()
    house.lose = {2: [ErrorType.ENGINE_LOST]}
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await logged(house, ("losing", 2))
    await handle.execute_update(SessionWorkflow.command, args=["c1", asked])
    house.losing.set()
    await logged(house, ("apply",))
    await end(handle)
    assert house.steps() == [("input", 1, "m1")]
    assert (("interrupt", 2) in house.log) == (asked == "interrupt")


async def test_an_interrupt_that_is_lost_with_its_node_is_repeated_wherever_the_record_stands(running):
    house = House(rounds=0)
    house.hold.clear()
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await house.entered.wait()
    house.interrupts_lost = 1
    await handle.execute_update(SessionWorkflow.command, args=["c1", "interrupt"])
    await logged(house, ("apply",))
    await end(handle)
    assert [entry for entry in house.log if entry[0] == "interrupt"] == [("interrupt", 2), ("interrupt", 2)]


async def test_word_of_a_message_that_was_taken_long_ago_keeps_no_failed_session_busy(running):
    house = House(rounds=0)
    house.refuse = {2}
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await logged(house, ("fail", "too long for the context"))
    house.takes = False
    await handle.execute_update(SessionWorkflow.deliver, "late")
    await logged(house, ("nothing to take", 3))
    await end(handle)
    assert house.log.count(("nothing to take", 3)) == 1


async def test_a_rewound_session_is_placed_anew_so_that_whoever_held_it_is_fenced_off(running):
    house = House(rounds=0)
    house.commands = [({"step_no": 3, "kind": "input", "outcome": "input"}, True)]
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await rested(house, 2)
    await handle.execute_update(SessionWorkflow.command, args=["c1", "rewind"])
    await rested(house, 3)
    assert house.steps()[-1] == ("think", 4, "none")
    assert house.epoch == 2
    await end(handle)


async def test_what_waited_too_long_is_applied_when_its_time_is_over(running):
    house = House(rounds=0)
    house.commands = [({"hold": "approval", "hold_until": time.time() + 0.5}, False), ({"hold": ""}, False)]
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.command, args=["c1", "pause"])
    await logged(house, ("apply",), 2)
    await end(handle)


class Elsewhere(House):
    """A record whose clock is `ahead_s` of the workflow's; what the session waits for expires half a second after the
    first look at it."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__()
        self.ahead_s = ahead_s
        self.expires_at = 0.0

    @activity.defn(name="apply")
    async def apply(self, what: ApplyIn) -> StepOut:
        now = time.monotonic()
        self.expires_at = self.expires_at or now + 0.5
        self.log.append(("apply",))
        left = self.expires_at - now
        about = {"hold": "approval", "hold_until": time.time() + self.ahead_s + left, "hold_left_s": left}
        if left <= 0:
            self.log.append(("expired",))
        self.stepped.set()
        return StepOut(Progress(**about) if left > 0 else Progress())


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
async def test_what_waits_expires_by_the_records_clock_and_nobody_asks_again_and_again(running, ahead_s):
    house = Elsewhere(ahead_s)
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.command, args=["c1", "pause"])
    await logged(house, ("expired",))
    await end(handle)
    assert house.log.count(("apply",)) <= 3


async def test_a_full_context_is_compacted_before_the_next_think(running):
    house = House(rounds=0)
    house.commands = [({"full": True, "kind": "input", "step_no": 1}, False)]
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.command, args=["c1", "resume"])
    await rested(house, 1)
    assert [entry for entry in house.log if entry[0] in ("compact", "think")] == [("compact", 2), ("think", 3, "none")]
    await end(handle)


async def test_a_recorded_history_replays(running, client: Client):
    from temporalio.worker import Replayer

    house = House(rounds=1)
    house.lose = {3: [ErrorType.ENGINE_LOST]}
    handle = await running(house)
    await handle.execute_update(SessionWorkflow.deliver, "m1")
    await rested(house, 4)
    await end(handle)
    await Replayer(workflows=[SessionWorkflow]).replay_workflow(await handle.fetch_history())


async def completed(handle: WorkflowHandle, activities: int) -> None:
    """Wait until the server knows that so many activities are done, whether or not anybody has acted on it."""
    done = EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED
    while sum(event.event_type == done for event in (await handle.fetch_history()).events) < activities:
        await asyncio.sleep(0.02)


async def test_a_session_whose_worker_is_gone_waits_with_nothing_that_could_run_out_and_goes_on(client):
    """However long: an hour is as good as a minute where no timeout is under way."""
    house = House(rounds=1)
    house.hold.clear()
    queue, name = f"sessions-{uuid.uuid4().hex}", f"session/{uuid.uuid4().hex}"
    async with contextlib.AsyncExitStack() as stack:
        home = [house.take_input, house.think, house.run_tools]
        await stack.enter_async_context(Worker(client, task_queue=house.queue, activities=home))
        anywhere = [house.place, house.fail, house.finish]
        await stack.enter_async_context(Worker(client, task_queue=NODES_QUEUE, activities=anywhere))
        async with Worker(client, task_queue=queue, workflows=[SessionWorkflow]):
            handle = await client.start_workflow(
                SessionWorkflow.run, SessionState("s", inbox=["m1"]), id=name, task_queue=queue
            )
            await house.entered.wait()
        house.hold.set()  # the think ends, and there is no worker to hear of it
        await completed(handle, 3)  # place, input, think
        waits = (await handle.describe()).raw_description
        assert not waits.pending_activities
        assert waits.pending_workflow_task.attempt <= 1
        timers = {event.event_type for event in (await handle.fetch_history()).events}
        assert EventType.EVENT_TYPE_TIMER_STARTED not in timers
        assert house.steps() == [("input", 1, "m1"), ("think", 2, "required")]
        async with Worker(client, task_queue=queue, workflows=[SessionWorkflow]):
            await completed(handle, 5)
            assert house.steps()[2:] == [("tools", 3), ("think", 4, "none")]
            assert house.epoch == 1, "nobody was taken for lost"
            await end(handle)
