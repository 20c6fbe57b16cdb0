"""The demo ended in the middle: by a closed terminal, by SIGTERM, by kill -9 of the demo itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import TEST_MODEL

pytestmark = [pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
async def test_nothing_runs_on_when_the_demo_is_ended(number, model_path):
    before = places()
    demo = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "runtime.cli",
        "demo",
        "--model",
        TEST_MODEL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert demo.stdout is not None
    async for line in demo.stdout:
        if b"think  started" in line:
            break
    family = psutil.Process(demo.pid).children(recursive=True)
    assert len(family) > 5
    os.kill(demo.pid, number)
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 60)
    assert alive == []
    await demo.stdout.read()
    await demo.wait()
    assert places() <= before


def places() -> set[Path]:
    """Directories of running stacks: sockets, and arenas in shared memory."""
    roots = (Path("/run"), Path("/dev/shm"), Path("/tmp"))
    return {path for root in roots for path in root.glob("tenuto-*") if not path.name.startswith("tenuto-demo-")}
