"""Sessions that rest: what each holds of the processes' memory, and how long a message takes to wake one."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import tenuto

from bench.evidence import Line
from bench.verdict import tell
from runtime.demo.stack import Stack
from runtime.store import Database

SPEC: dict[str, Any] = {"limits": {"max_think_tokens": 1}, "seed": 1}
AT_ONCE = 8  # while they are made
WAKING = 2  # more would measure how they wait for each other
MEASURED = ("api", "worker", "temporal", "node", "postgres")
_LOOK_EVERY_S = 0.02
_PATIENCE_S = 120.0

_WAKES = """
SELECT m.session_id,
    extract(epoch FROM min(e.created_at) FILTER (WHERE e.type = 'step.started') - m.created_at)::float8 AS started_s,
    extract(epoch FROM min(e.created_at) FILTER (WHERE e.type = 'model.delta') - m.created_at)::float8 AS token_s
FROM messages m JOIN LATERAL (
    SELECT type, created_at FROM events WHERE session_id = m.session_id AND created_at > m.created_at
) e ON true WHERE m.message_id = ANY($1) GROUP BY m.message_id
"""


async def parked(stack: Stack, client: tenuto.AsyncClient, count: int) -> list[Line]:
    """`count` sessions, each created, given a message and at rest; then each woken by another message."""
    async with Database(stack.postgres_dsn) as db:
        await _each(20, AT_ONCE, lambda _: _park(client, db))  # the processes' own first growth is nobody's
        before = rss(stack)
        sessions = await _each(count, AT_ONCE, lambda _: _park(client, db))
        after = rss(stack)
        order = random.Random(1).sample(sessions, len(sessions))
        messages = await _each(count, WAKING, lambda number: _wake(client, db, order[number]))
        rows = await db.fetch(_WAKES, messages)
        at_rest = await db.fetch("SELECT state, count(*) FROM sessions WHERE session_id = ANY($1) GROUP BY 1", sessions)
    lines: list[Line] = [{"kind": "memory", "sessions": count, "before": before, "after": after, "woken": rss(stack)}]
    lines += [{"kind": "wake", "started_s": row["started_s"], "token_s": row["token_s"]} for row in rows]
    return [*lines, {"kind": "rest", "states": {row["state"]: row["count"] for row in at_rest}}]


async def _park(client: tenuto.AsyncClient, db: Database) -> str:
    session = await client.sessions.create(**SPEC)
    await session.send("Hello.", tool_choice="none")
    await _rested(db, session.id)
    return session.id


async def _wake(client: tenuto.AsyncClient, db: Database, session_id: str) -> str:
    made = await client.post(f"/v1/sessions/{session_id}/events", {"content": "Again.", "tool_choice": "none"})
    await _rested(db, session_id)
    return str(made["id"])


async def _rested(db: Database, session_id: str) -> None:
    """Until every message is taken and the session is idle. Raises TimeoutError."""
    sql = (
        "SELECT state = 'idle' AND NOT EXISTS (SELECT 1 FROM messages m WHERE m.session_id = s.session_id"
        " AND m.state = 'accepted') AS rests FROM sessions s WHERE session_id = $1"
    )
    async with asyncio.timeout(_PATIENCE_S):
        while not ((row := await db.fetchrow(sql, session_id)) and row["rests"]):
            await asyncio.sleep(_LOOK_EVERY_S)


async def _each(count: int, at_once: int, work: Callable[[int], Awaitable[str]]) -> list[str]:
    """`work` for every number, so many at once; results in no order."""
    numbers, results = iter(range(count)), []
    told = itertools.count(1)

    async def work_on() -> None:
        for number in numbers:
            results.append(await work(number))
            if next(told) % 1000 == 0:
                tell(f"{len(results)} of {count}")

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work_on())
    return results


def rss(stack: Stack) -> dict[str, int]:
    """Resident bytes, by process."""
    pids = stack.state()["processes"]
    return {name: int(psutil.Process(pids[name]).memory_info().rss) for name in MEASURED}
