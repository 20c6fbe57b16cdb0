"""A session's workspace from outside, against the whole stack, and whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest

from runtime.demo.run import left_in_stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]


@pytest.mark.parametrize("part", ["node", "api", pytest.param("worker", marks=pytest.mark.soak)])
async def test_a_command_runs_once_whatever_is_killed_while_it_runs(client, stack, part):
    session = await client.sessions.create()
    await session.files.write("word", "tide")
    after = await session.position()
    running = asyncio.create_task(session.exec("cat word; sleep 2; echo x >> ran"))
    async for event in session.stream(after):
        if event.type == "exec.started":
            break
    stack.kill(part)
    ran = await running
    assert (ran.ok, ran.output) == (True, "tide")
    assert await session.files.read("ran", step=ran.step) == b"x\n"
    assert [event.type for event in await session.events()].count("exec.started") == 1
    await session.cancel()
    assert await left_in_stack(stack) == []


async def test_what_the_command_line_does_to_a_session_is_what_the_readme_says(client, stack, tmp_path):
    session = await client.sessions.create(limits={"max_think_tokens": 20}, seed=7)
    await session.run("One.")

    def tenuto(*words: str, given: str = "", status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "runtime.cli", *words],
            env={**os.environ, "TENUTO_API_URL": stack.api_url, "TENUTO_API_KEY": stack.api_key},
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stderr
        return done.stdout

    assert "step 3" in await asyncio.to_thread(tenuto, "files", "put", session.id, "a/b.txt", given="hello")
    assert (await asyncio.to_thread(tenuto, "files", "ls", session.id, "a")).split()[-1] == "a/b.txt"
    assert await asyncio.to_thread(tenuto, "files", "get", session.id, "a/b.txt") == "hello"
    assert await asyncio.to_thread(tenuto, "exec", session.id, "--", "cat", "a/b.txt") == "hello"
    await asyncio.to_thread(tenuto, "exec", session.id, "--", "bash", "-c", "exit 7", status=7)
    receipt = json.loads(await asyncio.to_thread(tenuto, "kv", "pin", session.id, "--json"))
    assert receipt["status"] in ("accepted", "clipped")
    await asyncio.to_thread(tenuto, "kv", "release", session.id)
    assert "host" in await asyncio.to_thread(tenuto, "kv", "tiers")
    assert "clean" in await asyncio.to_thread(tenuto, "kv", "audit")
    await asyncio.to_thread(tenuto, "files", "rm", session.id, "a")
    await asyncio.to_thread(tenuto, "export", session.id, str(tmp_path / "s.tar"))
    made = json.loads(await asyncio.to_thread(tenuto, "import", str(tmp_path / "s.tar"), "--json"))
    other = await client.sessions.get(made["id"])
    assert (await session.run("Two.")).text == (await other.run("Two.")).text
    assert await other.token_ids() == await session.token_ids()
    for one in (session, other):
        await one.cancel()
