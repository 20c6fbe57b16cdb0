"""Workflows of schedules and webhooks on a real Temporal server; what they did replays."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import WorkerDeploymentVersion
from temporalio.worker import Replayer, Worker, WorkerDeploymentConfig

from runtime.release import make_current
from workflows.contract import NODES_QUEUE, DeliveryIn, DeliveryOut, FiringIn, RunOut
from workflows.scheduled import ScheduledRunWorkflow
from workflows.webhook import DeliveryWorkflow


class Node:
    def __init__(self, looks: int = 0, waits: tuple[float, ...] = ()) -> None:
        self.log: list[str] = []
        self.looks = looks
        self.waits = list(waits)
        self.fired = asyncio.Event()

    @activity.defn(name="fire")
    async def fire(self, what: FiringIn) -> RunOut:
        self.log.append(f"fire {what.firing}")
        self.fired.set()
        return RunOut(over=False)

    @activity.defn(name="look_at_run")
    async def look(self, what: FiringIn) -> RunOut:
        self.log.append("look")
        self.looks -= 1
        return RunOut(over=self.looks == 0)

    @activity.defn(name="cancel_run")
    async def cancel(self, what: FiringIn) -> RunOut:
        self.log.append(f"cancel {what.firing}")
        return RunOut(over=True)

    @activity.defn(name="send_webhook")
    async def send(self, what: DeliveryIn) -> DeliveryOut:
        self.log.append(f"send {what.delivery_id}")
        if len(self.log) == 1:
            raise RuntimeError("the node had a bad moment")
        return DeliveryOut(self.waits.pop(0) if self.waits else 0.0)


@pytest.fixture
async def temporal(temporal_address: str) -> Client:
    return await Client.connect(temporal_address)


async def _in(client: Client, node: Node, scene) -> None:
    """On a queue and in a deployment of its own: these workflows follow whatever version of their code is current."""
    queue = f"sessions-{uuid.uuid4().hex}"
    here = WorkerDeploymentConfig(version=WorkerDeploymentVersion(queue, "1"), use_worker_versioning=True)
    workflows = [ScheduledRunWorkflow, DeliveryWorkflow]
    activities = [node.fire, node.look, node.cancel, node.send]
    async with (
        Worker(client, task_queue=queue, workflows=workflows, deployment_config=here),
        Worker(client, task_queue=NODES_QUEUE, activities=activities),
    ):
        await make_current(client, "1", queue)
        handle = await scene(queue)
    history = await handle.fetch_history()
    await Replayer(workflows=workflows).replay_workflow(history)


async def test_a_run_lasts_until_its_session_rests(temporal: Client):
    node, firing = Node(looks=1), f"scheduled/{uuid.uuid4().hex}"

    async def scene(queue: str):
        handle = await temporal.start_workflow(ScheduledRunWorkflow.run, FiringIn("sch_1"), id=firing, task_queue=queue)
        await handle.result()
        return handle

    await _in(temporal, node, scene)
    assert node.log == [f"fire {firing}", "look"]


async def test_a_run_that_is_cancelled_cancels_its_session(temporal: Client):
    node, firing = Node(looks=-1), f"scheduled/{uuid.uuid4().hex}"

    async def scene(queue: str):
        handle = await temporal.start_workflow(ScheduledRunWorkflow.run, FiringIn("sch_1"), id=firing, task_queue=queue)
        await node.fired.wait()
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        return handle

    await _in(temporal, node, scene)
    assert node.log[-1] == f"cancel {firing}"


async def test_a_delivery_is_tried_until_there_is_no_more_to_wait_for(temporal: Client):
    node, delivery = Node(waits=(0.01, 0.01)), f"whd_{uuid.uuid4().hex}"

    async def scene(queue: str):
        handle = await temporal.start_workflow(
            DeliveryWorkflow.run, DeliveryIn(delivery, 1), id=f"webhook/{delivery}/1", task_queue=queue
        )
        await handle.result()
        return handle

    await _in(temporal, node, scene)
    assert node.log == [f"send {delivery}"] * 4
