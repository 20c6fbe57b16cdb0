"""The nodes of one machine: each with a name, an engine of its own, and tiers that no other engine writes to.

What the machine was given is divided among them: cores, host memory, NVMe. The first one has the places that a single
node has, so that a machine may be given more nodes, or fewer, and finds what it had.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import StartupError
from runtime.settings import Settings


@dataclass(frozen=True)
class Seat:
    """One node and its engine. `node` and `engine` name the processes; `settings` are those of the node's process."""

    node: str
    engine: str
    settings: Settings
    socket: Path
    host_arena: Path
    kv_dir: Path
    threads: int


def seats(settings: Settings) -> list[Seat]:
    """In the order of their numbers. Raises StartupError where several nodes were given one engine."""
    if settings.nodes == 1:
        return [_seat(settings, 1)]
    if settings.engine_address is not None and settings.engine_address != str(settings.engine_socket):
        raise StartupError(
            f"TENUTO_NODES is {settings.nodes} and TENUTO_ENGINE_ADDRESS names one engine; each node has an engine of"
            " its own, so unset one of the two"
        )
    return [_seat(settings, number) for number in range(1, settings.nodes + 1)]


def unseated(settings: Settings) -> list[Path]:
    """Tiers of nodes that this machine no longer has."""
    kept = {seat.kv_dir for seat in seats(settings)}
    return sorted(path for path in settings.home.glob(f"{settings.kv_dir.name}-[0-9]*") if path not in kept)


def clear_unseated(settings: Settings) -> None:
    """Their pages are copies that nobody will look for again."""
    for path in unseated(settings):
        shutil.rmtree(path, ignore_errors=True)


def _seat(settings: Settings, number: int) -> Seat:
    alone, first = settings.nodes == 1, number == 1
    mark = "" if first else f"-{number}"
    socket = settings.run_dir / f"engine{mark}.sock"
    own = dataclasses.replace(
        settings,
        node_id=settings.node_id if alone else f"node-{number}",
        engine_address=settings.engine_address if alone and settings.engine_address else str(socket),
        host_kv_bytes=settings.host_kv_bytes // settings.nodes,
        nvme_kv_bytes=settings.nvme_kv_bytes // settings.nodes,
    )
    cores = len(os.sched_getaffinity(0))
    return Seat(
        node="node" if alone else f"node-{number}",
        engine="engine" if alone else f"engine-{number}",
        settings=own,
        socket=socket,
        host_arena=settings.host_arena.with_name(settings.host_arena.name + mark),
        kv_dir=settings.kv_dir.with_name(settings.kv_dir.name + mark),
        threads=settings.engine_threads or max(1, cores // settings.nodes),
    )
