from __future__ import annotations

import shutil
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import tenuto

from runtime.demo.run import demo_environment
from runtime.demo.stack import Stack, running_stack
from runtime.store import Database
from tests.conftest import TEST_MODEL
from tests.runtime.tools.servers import Seen, http_server

RUNNING: list[Stack] = []


@pytest.fixture(scope="session")
def web() -> Iterator[Seen]:
    """The one host that tools of the stack may reach."""
    with http_server() as seen:
        yield seen


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(model_path: Path, web: Seen) -> AsyncIterator[Stack]:
    """The whole stack as `tenuto up` starts it, once for the run; it survives what the tests do to it."""
    home = Path(tempfile.mkdtemp(prefix="tenuto-test-"))
    environment = demo_environment(home, TEST_MODEL)
    environment["TENUTO_EGRESS_ALLOW"] = web.url.removeprefix("http://")
    environment["TENUTO_SANDBOX_EGRESS_ALLOW"] = "pypi.org:443"
    environment["TENUTO_SANDBOX_VOLUMES"] += f",{sysconfig.get_path('purelib')}:/mnt/libs:ro"
    async with running_stack(environment, lambda _: None) as running:
        RUNNING.append(running)
        yield running
        RUNNING.clear()
    shutil.rmtree(home)


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[tenuto.AsyncClient]:
    async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
        yield client


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="session")
async def sessions_end() -> AsyncIterator[None]:
    """A module that leaves a session open is named: later ones count what the whole stack holds."""
    yield
    for stack in RUNNING:
        async with Database(stack.postgres_dsn) as db:
            rows = await db.fetch(
                "SELECT session_id, state FROM sessions WHERE state NOT IN ('cancelling', 'cancelled', 'completed')"
            )
        assert not rows, [tuple(row) for row in rows]
