"""Versions of the workflow code on a real Temporal server: who runs which, and how open sessions come to a new one."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from runtime import delivery
from runtime.release import build_id, make_current, release
from runtime.worker import make_worker, version
from tests.workflows.test_session import House
from workflows.contract import NODES_QUEUE, SESSIONS_QUEUE, workflow_id
from workflows.session import SessionWorkflow


@pytest.fixture
async def client(temporal_address: str) -> Client:
    """A namespace of its own."""
    name = f"test-{uuid.uuid4().hex}"
    client = await Client.connect(temporal_address, namespace=name)
    request = RegisterNamespaceRequest(namespace=name)
    request.workflow_execution_retention_period.FromTimedelta(timedelta(days=1))
    await client.workflow_service.register_namespace(request)
    while True:
        with contextlib.suppress(RPCError):
            await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=name))
            await client.count_workflows("WorkflowType = 'Session'")
            return client
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def nodes(client: Client, house: House) -> AsyncIterator[None]:
    home = Worker(client, task_queue=house.queue, activities=[house.take_input, house.think, house.run_tools])
    anywhere = Worker(client, task_queue=NODES_QUEUE, activities=[house.place, house.fail, house.finish])
    async with home, anywhere:
        yield


async def version_of(client: Client, session_id: str) -> str:
    about = await client.get_workflow_handle(workflow_id(session_id)).describe()
    return about.raw_description.workflow_execution_info.versioning_info.deployment_version.build_id


async def rested(house: House, steps: int) -> None:
    while len(house.steps()) < steps:
        house.stepped.clear()
        await house.stepped.wait()


async def listed(client: Client, count: int) -> None:
    """Wait until the sessions stand in the list of workflows, which is written after the fact."""
    while (await client.count_workflows("WorkflowType = 'Session' AND ExecutionStatus = 'Running'")).count < count:
        await asyncio.sleep(0.05)


def test_a_version_is_named_by_the_content_of_the_workflow_code():
    assert len(build_id()) == 16
    assert int(build_id(), 16) >= 0


async def test_a_session_stays_with_its_version_and_comes_to_the_next_one_when_that_is_released(client):
    house = House(rounds=0)
    async with nodes(client, house), make_worker(client, deployment_config=version("one")):
        await make_current(client, "one")
        await delivery.deliver(client, "s", "m1")
        await rested(house, 2)
        async with make_worker(client, deployment_config=version("two")):
            await listed(client, 1)
            await make_current(client, "two")
            await delivery.deliver(client, "t", "m1")
            await rested(house, 4)
            assert await version_of(client, "s") == "one"
            assert await version_of(client, "t") == "two"
            await listed(client, 2)
            done = await release(client, "two")
            assert (done.current, done.told, done.restarted) == (1, 1, 0)
            while await version_of(client, "s") != "two":
                await asyncio.sleep(0.05)
            await delivery.deliver(client, "s", "m2")
            await rested(house, 6)
    assert [entry[0] for entry in house.log].count("place") == 2  # one for each session, none for the upgrade


async def test_a_session_whose_version_is_gone_begins_again_from_the_record(client):
    """Here one from before there were versions: a worker without any ran it, and is no more."""
    house = House(rounds=0)
    async with nodes(client, house):
        async with Worker(client, task_queue=SESSIONS_QUEUE, workflows=[SessionWorkflow]):
            await delivery.deliver(client, "s", "m1")
            await rested(house, 2)
            await listed(client, 1)
        async with make_worker(client, deployment_config=version("two")):
            done = await release(client, "two")
            assert (done.current, done.told, done.restarted) == (0, 0, 1)
            await delivery.deliver(client, "s", "m2")
            await rested(house, 4)
            assert await version_of(client, "s") == "two"
    steps = [(entry[0], entry[1]) for entry in house.steps()]
    assert steps == [("input", 1), ("think", 2), ("input", 3), ("think", 4)]
