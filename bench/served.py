"""A real engine process for a bench."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compiled import BenchError


@dataclass(frozen=True)
class Served:
    socket: Path
    pid: int
    ready: dict[str, Any]


def tiered(root: Path, pool_tokens: int, tier_bytes: int) -> dict[str, Any]:
    """Options of an engine with a pool and two tiers under `root`."""
    return {
        "kv_tokens": pool_tokens,
        "host_arena": root / "arena",
        "host_bytes": tier_bytes,
        "nvme_dir": root / "nvme",
        "nvme_bytes": tier_bytes,
    }


@contextlib.asynccontextmanager
async def served(model: Path, root: Path, *, module: str = "engine", **options: Any) -> AsyncIterator[Served]:
    """`python -m engine` with its files under `root`; terminated at the end. Raises BenchError if it does not start.

    `module` stands in for `engine`: one that hobbles it.
    """
    arguments = {"model": model, "socket": root / "engine.sock", **options}
    flat = [part for name, value in arguments.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    log = root / "engine.log"
    with log.open("w") as errors:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *flat, stdout=asyncio.subprocess.PIPE, stderr=errors
        )
    try:
        assert child.stdout is not None
        line = await child.stdout.readline()
        if not line:
            last = (log.read_text().strip().splitlines() or ["it gave no reason"])[-1]
            raise BenchError(f"the engine does not start in {options.get('dtype', 'bf16')}: {last}")
        yield Served(root / "engine.sock", child.pid, json.loads(line))
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        await child.wait()
