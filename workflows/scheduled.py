"""One firing of a schedule: makes a session and lasts as long as that works, so that overlaps are Temporal's to see."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows import contract
    from workflows.contract import FiringIn, RunOut

_KEEP_TRYING = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=30))
LOOKS = 200  # in one run of the workflow
LOOK_FIRST_S, LOOK_LATER_S = 1.0, 30.0


@workflow.defn(name="ScheduledRun", versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class ScheduledRunWorkflow:
    @workflow.run
    async def run(self, what: FiringIn) -> None:
        """Cancelled, where the schedule's overlap policy says so: the session is cancelled too."""
        firing = replace(what, firing=what.firing or workflow.info().workflow_id)
        try:
            made: RunOut = await _do(contract.FIRE, firing)
            pause_s = LOOK_FIRST_S
            for _ in range(LOOKS):
                if made.over:
                    return
                await workflow.sleep(pause_s)
                made = await _do(contract.LOOK_AT_RUN, firing)
                pause_s = min(pause_s * 1.5, LOOK_LATER_S)
        except (asyncio.CancelledError, ActivityError) as error:
            if not is_cancelled_exception(error):
                raise
            await _do(contract.CANCEL_RUN, firing)
            raise
        workflow.continue_as_new(firing)


async def _do(name: str, firing: FiringIn) -> Any:
    return await workflow.execute_activity(
        name,
        firing,
        task_queue=contract.NODES_QUEUE,
        start_to_close_timeout=timedelta(minutes=1),
        retry_policy=_KEEP_TRYING,
        result_type=RunOut,
    )
