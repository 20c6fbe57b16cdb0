"""`tenuto up` stopped in the middle of a session and started again: the session goes on."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import psutil
import pytest
import tenuto

from runtime.demo.run import demo_environment, left_in_stack
from runtime.demo.stack import leftovers, running_stack
from tests.conftest import TEST_MODEL
from tests.stack.test_sessions import sleeper

pytestmark = [pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]


async def test_a_session_whose_stack_was_stopped_in_a_tool_goes_on_when_it_is_up_again(model_path):
    home = Path(tempfile.mkdtemp(prefix="tenuto-test-"))
    environment = demo_environment(home, TEST_MODEL)
    environment.pop("TENUTO_SANDBOX_VOLUMES")
    async with running_stack(environment, lambda _: None) as stack:
        pids = dict(stack.state()["processes"])
        async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
            session = await client.sessions.create(
                tools=[sleeper(3)], files={"kept.txt": "kept"}, limits={"max_think_tokens": 60}, seed=4
            )
            message_id = await session.send("Wait.", tool_choice="required", max_tool_rounds=1)
            async for event in session.stream():
                if event.type == "tool.started":
                    break
    assert leftovers(stack, pids) == []
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]

    async with running_stack(environment, lambda _: None) as stack:
        async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
            session = await client.sessions.get(session.id)
            turn = tenuto.TurnReader(message_id)
            seen = []
            async for event in session.stream():
                seen.append(event.id)
                turn.feed(event)
                if turn.done:
                    break
            turn.result()
            assert seen == list(range(1, len(seen) + 1))
            steps = await session.steps()
            assert [(step["kind"], step["state"]) for step in steps] == [
                ("input", "completed"),
                ("think", "completed"),
                ("tool", "completed"),
                ("think", "completed"),
            ]
            assert steps[1]["attempts"] == 1
            assert steps[2]["attempts"] > 1
            await session.cancel()
        assert await left_in_stack(stack) == []
    shutil.rmtree(home)
