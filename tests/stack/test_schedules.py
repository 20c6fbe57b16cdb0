"""A schedule against the whole stack: it fires by itself, and its sessions end by themselves."""

from __future__ import annotations

import contextlib

import pytest

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.model]


async def test_a_schedule_makes_sessions_that_end_by_themselves(client, stack):
    await client.post("/v1/agents", {"name": "teller", "limits": {"max_think_tokens": 4}})
    hook = await client.post("/v1/schedules", {"agent": "teller", "message": "Say hello.", "every_s": 1})
    at = f"/v1/schedules/{hook['id']}"
    sessions = []
    async with contextlib.aclosing(_runs(client, at)) as runs:
        async for run in runs:
            sessions.append(await client.sessions.get(run["session_id"]))
            if len(sessions) == 2:
                break
    await client.delete(at)
    for session in sessions:
        async for _ in session.stream():
            pass
        info = await session.info()
        assert (info.state, info.model_extra["schedule"]) == ("completed", hook["id"])
        assert info.model_extra["agent"] == {"name": "teller", "version": 1}


async def _runs(client, at):
    """Runs of a schedule, oldest first, as they begin."""
    told = set()
    while True:
        for run in reversed((await client.get(f"{at}/runs"))["data"]):
            if run["id"] not in told:
                told.add(run["id"])
                yield run
