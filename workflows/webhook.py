"""One delivery of a webhook: tried, at the times that the record says, until it has an end."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy, VersioningBehavior

with workflow.unsafe.imports_passed_through():
    from workflows import contract
    from workflows.contract import DeliveryIn, DeliveryOut

_KEEP_TRYING = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(minutes=1))


@workflow.defn(name="WebhookDelivery", versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class DeliveryWorkflow:
    @workflow.run
    async def run(self, what: DeliveryIn) -> None:
        """How often and when is for the record to say; it outlives this run."""
        while True:
            tried: DeliveryOut = await workflow.execute_activity(
                contract.SEND_WEBHOOK,
                what,
                task_queue=contract.NODES_QUEUE,
                start_to_close_timeout=timedelta(minutes=1),
                retry_policy=_KEEP_TRYING,
                result_type=DeliveryOut,
            )
            if not tried.wait_s:
                return
            await workflow.sleep(tried.wait_s)
