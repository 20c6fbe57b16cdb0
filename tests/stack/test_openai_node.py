"""OpenAI's own Node client against the whole stack, by the tour in tests/clients/node."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from runtime.demo.stack import Stack
from tests.conftest import TEST_MODEL
from tests.stack.test_openai_python import end_all

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.stack,
    pytest.mark.sandbox,
    pytest.mark.model,
    pytest.mark.node,
]

TOUR = Path(__file__).parents[1] / "clients" / "node"


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="session")
async def nothing_is_left(stack: Stack) -> AsyncIterator[None]:
    yield
    await end_all(stack)


async def test_the_node_client_sees_every_endpoint_and_loses_its_connection_at_every_event(stack: Stack) -> None:
    node = shutil.which("node")
    if node is None or not (TOUR / "node_modules" / "openai").is_dir():
        pytest.skip("there is no Node with OpenAI's client here; apt-get install nodejs npm, and make setup again")
    process = await asyncio.create_subprocess_exec(
        node, "tour.mjs",
        cwd=TOUR,
        env={
            "PATH": os.environ["PATH"],
            "OPENAI_BASE_URL": f"{stack.api_url}/v1",
            "OPENAI_API_KEY": stack.api_key,
            "MODEL": TEST_MODEL,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    seen = json.loads(out)
    assert seen["events"] > 5
    assert seen["cancelled"] == "response.incomplete"
    assert seen["after"] is True
    assert TEST_MODEL in seen["models"]
