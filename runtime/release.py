"""Which version of the workflow code new sessions begin with, and how open ones come to it.

    current     new runs begin with it
    polled      a worker of it is there: its sessions are told to look, and go on as a new run of the current version at
                their next step boundary
    gone        nobody polls it any more, or its sessions come from before there were versions: they are ended in
                Temporal and begin again from the record, at the step that was not completed

A version is named by the content of `workflows/*.py`, so a release that does not change them changes nothing here.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest, SetWorkerDeploymentCurrentVersionRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

import workflows
from runtime import delivery
from runtime.errors import StartupError
from workflows.contract import SESSIONS_QUEUE, workflow_id
from workflows.session import SessionWorkflow

DEPLOYMENT: Final = "tenuto"
_KNOWN_WITHIN_S: Final = 30.0
_POLLED_WITHIN: Final = timedelta(seconds=90)  # a poll waits for a minute
_PREFIX: Final = workflow_id("")


@dataclass
class Released:
    """How many open sessions were found at this version, told to come to it, or begun again at it."""

    current: int = 0
    told: int = 0
    restarted: int = 0


@functools.cache
def build_id() -> str:
    """Of the workflow code that is installed here."""
    digest = hashlib.sha256()
    for path in sorted(Path(workflows.__file__).parent.glob("*.py")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


async def make_current(client: Client, build: str, deployment: str = DEPLOYMENT) -> None:
    """New sessions begin with this version from now on. Its worker may only just have begun to poll."""
    request = SetWorkerDeploymentCurrentVersionRequest(
        namespace=client.namespace, deployment_name=deployment, build_id=build, ignore_missing_task_queues=True
    )
    deadline = asyncio.get_running_loop().time() + _KNOWN_WITHIN_S
    while True:
        try:
            await client.workflow_service.set_worker_deployment_current_version(request)
            return
        except RPCError as error:
            # Not known yet, or changed by somebody else at the same time.
            again = error.status in (RPCStatusCode.NOT_FOUND, RPCStatusCode.FAILED_PRECONDITION, RPCStatusCode.ABORTED)
            if not again or asyncio.get_running_loop().time() > deadline:
                raise StartupError(f"the workflow code {build} could not be released: {error}") from error
        await asyncio.sleep(0.1)


async def release(client: Client, build: str) -> Released:
    """Make the version current and bring every open session to it, or on its way."""
    await make_current(client, build)
    done = Released()
    polled: dict[str, bool] = {build: True}
    async for session_id, run_id, version in _open(client):
        if version == build:
            done.current += 1
            continue
        if version not in polled:
            polled[version] = bool(version) and await is_polled(client, version)
        if polled[version]:
            await delivery.quietly(_tell(client, session_id))
            done.told += 1
        else:
            await delivery.quietly(restart(client, session_id, run_id))
            done.restarted += 1
    return done


async def restart(client: Client, session_id: str, run_id: str | None = None) -> None:
    """End a session's workflow, which nobody can run any more, and begin it again from the record. What it was doing
    goes on: a call in its sandbox is found again, a think after its last durable token."""
    handle = client.get_workflow_handle(workflow_id(session_id), run_id=run_id)
    try:
        await handle.terminate("its workflow code is no longer here")
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
    await delivery.revive(client, session_id)


async def is_polled(client: Client, build: str) -> bool:
    """Whether a worker of this version has asked for work lately."""
    request = DescribeTaskQueueRequest(
        namespace=client.namespace,
        task_queue=TaskQueue(name=SESSIONS_QUEUE),
        task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
    )
    answer = await client.workflow_service.describe_task_queue(request)
    since = datetime.now(UTC) - _POLLED_WITHIN
    return any(
        (poller.deployment_options.deployment_name, poller.deployment_options.build_id) == (DEPLOYMENT, build)
        and poller.last_access_time.ToDatetime(UTC) > since
        for poller in answer.pollers
    )


async def _tell(client: Client, session_id: str) -> None:
    await client.get_workflow_handle(workflow_id(session_id)).signal(SessionWorkflow.look)


async def _open(client: Client) -> AsyncIterator[tuple[str, str | None, str]]:
    """Id, run and version of every session that has a workflow; the version is empty from before there were any."""
    async for found in client.list_workflows("WorkflowType = 'Session' AND ExecutionStatus = 'Running'"):
        if not found.id.startswith(_PREFIX):
            continue
        try:
            about = await client.get_workflow_handle(found.id).describe()
        except RPCError:
            continue
        versioning = about.raw_description.workflow_execution_info.versioning_info
        yield found.id.removeprefix(_PREFIX), about.run_id, versioning.deployment_version.build_id
