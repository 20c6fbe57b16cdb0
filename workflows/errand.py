"""An errand: one activity at one node, once, for somebody who waits. What is asked and what came of it is in a row."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from workflows import contract
    from workflows.contract import ErrandIn

_TAKEN_UP_WITHIN = timedelta(seconds=5)  # a node that lives takes it at once; another is asked otherwise
_HEARTBEAT = timedelta(seconds=5)


@workflow.defn(name="Errand")
class ErrandWorkflow:
    @workflow.run
    async def run(self, what: ErrandIn) -> None:
        await workflow.execute_activity(
            contract.ERRAND,
            what,
            task_queue=what.queue,
            schedule_to_start_timeout=_TAKEN_UP_WITHIN,
            start_to_close_timeout=timedelta(seconds=what.within_s),
            heartbeat_timeout=_HEARTBEAT,
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            retry_policy=RetryPolicy(maximum_attempts=1),
        )
