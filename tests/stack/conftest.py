from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
import tenuto

from runtime.demo.run import demo_environment
from runtime.demo.stack import Stack, running_stack
from tests.conftest import TEST_MODEL


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(model_path: Path) -> AsyncIterator[Stack]:
    """The whole stack as `tenuto up` starts it, once for the run; it survives what the tests do to it."""
    home = Path(tempfile.mkdtemp(prefix="tenuto-test-"))
    async with running_stack(demo_environment(home, TEST_MODEL), lambda _: None) as running:
        yield running
    shutil.rmtree(home)


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[tenuto.AsyncClient]:
    async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
        yield client
