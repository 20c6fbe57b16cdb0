"""`tenuto worker`: workflow code and nothing else, so that no other work holds its GIL.

It serves one version of that code, named by its content: a session stays with the version that it began with until a
step boundary, where it goes on as a new run of the current one (see `runtime.release`).
"""

from __future__ import annotations

from typing import Any

from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.worker import Worker, WorkerDeploymentConfig
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from runtime.process import announce_ready, connect_temporal, run, settle, until_stopped
from runtime.release import DEPLOYMENT, build_id
from runtime.settings import Settings
from workflows.contract import SESSIONS_QUEUE
from workflows.errand import ErrandWorkflow
from workflows.scheduled import ScheduledRunWorkflow
from workflows.session import SessionWorkflow
from workflows.webhook import DeliveryWorkflow

WORKFLOWS: tuple[type, ...] = (SessionWorkflow, DeliveryWorkflow, ErrandWorkflow, ScheduledRunWorkflow)

# Modules of the workflows are loaded once, not for each session: a parked one then holds a tenth of the memory. What
# determinism needs of them is tested under the runner's full restrictions.
_RUNNER = SandboxedWorkflowRunner(restrictions=SandboxRestrictions.default.with_passthrough_modules("workflows"))


def version(build: str) -> WorkerDeploymentConfig:
    """What a worker that serves this version says of itself."""
    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(DEPLOYMENT, build),
        use_worker_versioning=True,
        default_versioning_behavior=VersioningBehavior.PINNED,
    )


def make_worker(client: Client, **options: Any) -> Worker:
    """`options`: of the Worker, over ours."""
    ours: dict[str, Any] = {"deployment_config": version(build_id()), "workflow_runner": _RUNNER}
    return Worker(client, task_queue=SESSIONS_QUEUE, workflows=WORKFLOWS, **(ours | options))


async def serve(settings: Settings) -> None:
    client = await connect_temporal(settings)
    async with make_worker(client):
        settle()
        announce_ready(build=build_id())
        await until_stopped()


if __name__ == "__main__":
    run(serve(Settings.load()))
