"""Temporal's database is gone; Postgres is not, and every session goes on from it."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import tenuto

from runtime.demo.run import demo_environment, left_in_stack
from runtime.demo.stack import running_stack
from tests.conftest import TEST_MODEL
from tests.stack.test_nodes import command, reached
from tests.upgrade.test_previous import ONCE, STORY, TALK, TOOL

pytestmark = [pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]


async def test_every_session_goes_on_after_temporal_forgot_them_all(model_path):
    home = Path(tempfile.mkdtemp(prefix="tenuto-test-"))
    environment = demo_environment(home, TEST_MODEL)
    del environment["TENUTO_SANDBOX_VOLUMES"]  # a stack that is stopped ends its sandboxes: the call runs again
    messages: list[str] = []
    async with running_stack(environment, lambda _: None) as stack:
        async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
            calm = await client.sessions.create(**STORY)
            await calm.run("Write a very long story.")
            expected = await calm.token_ids()
            await calm.cancel()
            think, tool, talk, fresh = [
                await client.sessions.create(**spec) for spec in (STORY, TOOL, TALK, {"limits": {}})
            ]
            await talk.run("One.")
            messages.append(await think.send("Write a very long story."))
            messages.append(await tool.send("Wait.", **ONCE))
            await reached(think, "model.delta")
            await reached(tool, "tool.started")
    for file in stack.settings.temporal_dir.glob("temporal.db*"):
        file.unlink()
    async with running_stack(environment, lambda _: None) as stack:
        status, text = await command(stack, "reconcile", "--json")
        found = json.loads(text)
        assert status == 0
        assert (found["open"], found["not_begun"], found["failed"]) == (4, 1, 0)
        assert found["restarted"] + found["running"] == 3  # the loop of a node may have been there before us
        async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
            for session_id, message_id in zip((think.id, tool.id), messages, strict=True):
                session = await client.sessions.get(session_id)
                turn = tenuto.TurnReader(message_id)
                async for event in session.stream():
                    turn.feed(event)
                    if turn.done:
                        break
                turn.result()
                assert len([step for step in await session.steps() if step["kind"] == "input"]) == 1
            assert await (await client.sessions.get(think.id)).token_ids() == expected
            again = await (await client.sessions.get(talk.id)).run("Two.")
            assert again.events[-1].type == "session.idle"
            for session_id in (think.id, tool.id, talk.id, fresh.id):
                await (await client.sessions.get(session_id)).cancel()
        assert await left_in_stack(stack) == []
        status, text = await command(stack, "reconcile", "--json")
        assert json.loads(text)["open"] == 0
    shutil.rmtree(home)
