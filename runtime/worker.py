"""`tenuto worker`: workflow code and nothing else, so that no other work holds its GIL."""

from __future__ import annotations

from temporalio.client import Client
from temporalio.worker import Worker

from runtime.process import announce_ready, connect_temporal, run, until_stopped
from runtime.settings import Settings
from workflows.contract import SESSIONS_QUEUE
from workflows.session import SessionWorkflow


def make_worker(client: Client, **options: object) -> Worker:
    return Worker(client, task_queue=SESSIONS_QUEUE, workflows=[SessionWorkflow], **options)  # type: ignore[arg-type]


async def serve(settings: Settings) -> None:
    client = await connect_temporal(settings)
    async with make_worker(client):
        announce_ready()
        await until_stopped()


if __name__ == "__main__":
    run(serve(Settings.load()))
