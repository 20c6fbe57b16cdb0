"""What every process of ours does the same way: logs, readiness, stopping, failing, reaching Temporal."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import sys
from collections.abc import Coroutine
from typing import Any, Final, NoReturn

from temporalio.client import Client

from engine import EngineError
from kvtier import TierError
from runtime.errors import StartupError, TenutoError, Unavailable
from runtime.settings import Settings
from sandbox import SandboxError

REFUSED: Final = 2  # exit status: it said why in a sentence, and starting it again changes nothing


def run(work: Coroutine[Any, Any, None]) -> None:
    """Runs a process's work. An error that we raise on purpose becomes a JSON line and an exit status."""
    try:
        asyncio.run(work)
    except (TenutoError, EngineError, SandboxError, TierError) as error:
        refuse(error)


def refuse(error: Exception) -> NoReturn:
    """End the process with a JSON line and an exit status."""
    print(json.dumps({"error": str(error), "kind": type(error).__name__}), file=sys.stderr, flush=True)
    sys.exit(1 if isinstance(error, Unavailable) else REFUSED)


TELLS_CONTENT: Final = ("httpx2", "httpcore2", "mcp", "client")  # the last one is mcp's too


def start_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for name in TELLS_CONTENT:  # whatever the level: addresses with arguments in them, and what servers said
        logging.getLogger(name).setLevel(logging.CRITICAL)


def settle() -> None:
    """What was made at the start lives as long as the process: collections of garbage need not look through it.

    They were two fifths of what the API spends on a request."""
    gc.collect()
    gc.freeze()


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
