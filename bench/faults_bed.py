"""A stack that can be broken in every way of `faults_plan`: bridges that can be cut, disks that can be filled, and a
Docker engine of its own that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.bridge import Bridge, Streams
from bench.faults_plan import CUTS, DISKS
from bench.own_docker import Dockerd, own_dockerd
from bench.verdict import tell
from runtime.demo.run import demo_environment
from runtime.demo.stack import Stack, leftovers, running_stack, settings_with
from runtime.settings import Settings

DISK_SIZES = {"home": "1500M", "blobs": "64M", "kv": "512M"}  # the home holds the other two


@dataclass
class Bed:
    """`without`: names of faults that this machine cannot do. `left`: what is there after the stack has stopped."""

    stack: Stack
    bridges: Mapping[str, Bridge]
    disks: Mapping[str, Path]
    dockerd: Dockerd | None
    without: frozenset[str] = field(init=False)
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        without = {f"full {disk}" for disk in DISKS if disk not in self.disks}
        without |= {f"cut {bridge}" for bridge in CUTS if bridge not in self.bridges}
        self.without = frozenset(without | (set() if self.dockerd else {"kill dockerd"}))


@contextlib.asynccontextmanager
async def bed(model: str, nodes: int = 1, sandbox: str = "auto") -> AsyncIterator[Bed]:
    """`sandbox`: docker brings an engine of our own; auto does so where root can start one, else it is bubblewrap."""
    base = Path(tempfile.mkdtemp(prefix="tenuto-bench-"))
    try:
        with contextlib.ExitStack() as machine:
            environment = demo_environment(base, model)
            if nodes > 1:
                environment["TENUTO_NODES"] = str(nodes)
            disks = _disks(machine, base / "home")
            dockerd = machine.enter_context(own_dockerd()) if sandbox != "bubblewrap" else None
            if dockerd is not None:
                environment["DOCKER_HOST"] = dockerd.address
            environment["TENUTO_SANDBOX"] = "docker" if dockerd else "bubblewrap"
            async with _bridges(settings_with(environment)) as bridges:
                ports = [part for name, one in bridges.items() for part in (f"--{name}", str(one.port))]
                async with running_stack(environment, tell, ("bench.cut_stack", *ports)) as stack:
                    made = Bed(stack, bridges, disks, dockerd)
                    yield made
                    pids = dict(stack.state()["processes"])
                made.left += leftovers(stack, pids)
    finally:
        shutil.rmtree(base, ignore_errors=True)


@contextlib.asynccontextmanager
async def _bridges(settings: Settings) -> AsyncIterator[dict[str, Bridge]]:
    async def postgres() -> Streams:
        return await asyncio.open_unix_connection(settings.postgres_run_dir / ".s.PGSQL.5432")

    async def temporal() -> Streams:
        port = int((settings.temporal_dir / "port").read_text())
        return await asyncio.open_connection("127.0.0.1", port)

    async with contextlib.AsyncExitStack() as opened:
        reach = {name: temporal if name.endswith("temporal") else postgres for name in CUTS}
        yield {name: await opened.enter_async_context(Bridge(reach[name]).open()) for name in CUTS}


# --- disks ---------------------------------------------------------------------------------------------------------


def _disks(machine: contextlib.ExitStack, home: Path) -> dict[str, Path]:
    """Small file systems for the home and what is in it; none where we may not mount."""
    places = {"home": home, "blobs": home / "blobs", "kv": home / "kv"}
    for name, at in places.items():
        at.mkdir(mode=0o711, exist_ok=True)
        options = f"size={DISK_SIZES[name]},mode=0711"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], capture_output=True)
        if done.returncode:
            return {}
        machine.callback(subprocess.run, ["umount", "--lazy", str(at)], check=False)
    return places


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Not a byte is free on the disk, until the block ends."""
    ballast = disk / "ballast"
    try:
        with ballast.open("wb") as file:
            free = os.statvfs(disk)
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
            with contextlib.suppress(OSError):  # what became free meanwhile
                while os.write(file.fileno(), bytes(4096)):
                    pass
        yield
    finally:
        ballast.unlink(missing_ok=True)
