"""A whole stack in front of another whole stack: a Tenuto whose model server is a second Tenuto."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from runtime.demo.run import demo_environment, left_in_stack
from runtime.demo.stack import Stack, leftovers, running_stack
from tests.stack.test_external import NOTE, of_type, play
from tests.stack.test_openai_python import end_all

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]


class Second:
    """The API of the stack behind, which is killed as a server is."""

    def __init__(self, stack: Stack) -> None:
        self._stack, self._old = stack, 0

    def kill(self) -> None:
        self._old = self._stack.kill("api")

    async def start(self) -> None:
        await self._stack.restarted("api", self._old)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def before(stack: Stack) -> AsyncIterator[Stack]:
    """The stack in front."""
    home = Path(tempfile.mkdtemp(prefix="tenuto-test-"))
    environment = {**demo_environment(home, f"openai:{stack.api_url}/v1"), "TENUTO_OPENAI_KEY": stack.api_key}
    async with running_stack(environment, lambda _: None) as running:
        yield running
        pids = dict(running.state()["processes"])
    assert leftovers(running, pids) == []
    shutil.rmtree(home)
    await end_all(stack)


async def test_a_session_completes_whatever_dies_before_or_behind(before: Stack, stack: Stack) -> None:
    plan = {("think", 1): "engine", ("tool", 1): "node", ("think", 2): "server"}
    spec = {"tools": [NOTE], "limits": {"max_think_tokens": 40}, "system": "Be brief."}
    events, calls = await play(before, Second(stack), plan, "required", **spec)  # type: ignore[arg-type]
    assert len(calls.split()) == len(of_type(events, "tool.settled"))
    thinks = [event.data for event in of_type(events, "step.completed") if "usage" in event.data]
    assert thinks
    assert all(think["exact"] is False for think in thinks)
    assert await left_in_stack(before) == []
