"""The demo ended in the middle: by a closed terminal, by SIGTERM, by kill -9 of the demo itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import TEST_MODEL

pytestmark = [pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=pytest.mark.soak) for number in (signal.SIGHUP, signal.SIGTERM)] + [signal.SIGKILL],
)
async def test_nothing_runs_on_when_the_demo_is_ended(number, model_path):
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
    places = places_of(family)
    assert len(places) >= 2
    os.kill(demo.pid, number)
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 60)
    assert alive == []
    await demo.stdout.read()
    await demo.wait()
    assert [place for place in places if place.exists()] == []


def places_of(family: Sequence[psutil.Process]) -> set[Path]:
    """Directories that a running stack has beside its home, as its processes name them: sockets, and arenas in shared
    memory."""
    words = " ".join(word for process in family for word in process.cmdline())
    return {Path(found) for found in re.findall(r"/(?:run|dev/shm)/tenuto-[\w-]+", words)}
