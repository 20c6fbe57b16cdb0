"""What every long-running process of ours does the same way: logs, readiness, stopping, reaching Temporal."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys

from temporalio.client import Client

from runtime.errors import StartupError
from runtime.settings import Settings


def start_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


def announce_ready(**facts: object) -> None:
    """The line that the supervisor waits for."""
    print(json.dumps({"ready": True, **facts}), flush=True)


async def until_stopped() -> None:
    """Return on SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()


async def connect_temporal(settings: Settings, *, patience_s: float = 60.0) -> Client:
    """Connect, waiting for a server that is away. Raises StartupError with the address."""
    deadline = asyncio.get_running_loop().time() + patience_s
    address = settings.temporal_address_required
    while True:
        try:
            return await Client.connect(address, namespace=settings.temporal_namespace)
        except RuntimeError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise StartupError(f"Temporal does not answer at {address}: {error}") from error
        await asyncio.sleep(0.3)
