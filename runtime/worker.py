"""`tenuto worker`: workflow code and nothing else, so that no other work holds its GIL."""

from __future__ import annotations

from temporalio.client import Client
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from runtime.process import announce_ready, connect_temporal, run, until_stopped
from runtime.settings import Settings
from workflows.contract import SESSIONS_QUEUE
from workflows.session import SessionWorkflow

WORKFLOWS: tuple[type, ...] = (SessionWorkflow,)

# Modules of the workflows are loaded once, not for each session: a parked one then holds a tenth of the memory. What
# determinism needs of them is tested under the runner's full restrictions.
_RUNNER = SandboxedWorkflowRunner(restrictions=SandboxRestrictions.default.with_passthrough_modules("workflows"))


def make_worker(client: Client, **options: object) -> Worker:
    return Worker(
        client,
        task_queue=SESSIONS_QUEUE,
        workflows=WORKFLOWS,
        workflow_runner=_RUNNER,
        **options,  # type: ignore[arg-type]
    )


async def serve(settings: Settings) -> None:
    client = await connect_temporal(settings)
    async with make_worker(client):
        announce_ready()
        await until_stopped()


if __name__ == "__main__":
    run(serve(Settings.load()))
