"""First-token time after a tool, by where the session's KV waited."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from typing import Any

import tenuto

from runtime.demo import story

POLICIES = {"pinned": "pin", "host": "host", "nvme": "nvme", "recompute": "drop"}
TOOL_S = 1.5  # long enough for the pages to have moved before the tool ends


async def first_token_times(
    client: tenuto.AsyncClient, context_tokens: int, seed: int, say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Milliseconds from the tool's end to the first token that follows, per place; and where the tokens came from.

    Each place is a session of its own with `context_tokens` of context or more, so that none helps another.
    """
    times: dict[str, float] = {}
    sources: dict[str, dict[str, Any]] = {}
    for number, (place, policy) in enumerate(POLICIES.items()):
        say(f"timing: KV {place}")
        times[place], sources[place] = await _one(client, policy, context_tokens, seed * 10 + number)
    return times, sources


async def _one(client: tenuto.AsyncClient, policy: str, context_tokens: int, salt: int) -> tuple[float, dict[str, Any]]:
    spec = story.session(salt, 0.0, long_s=TOOL_S, short_s=TOOL_S)
    # A word of the handbook is a little more than one token.
    spec |= {"system": story.handbook(context_tokens, salt), "kv": {"on_tool": policy}}
    session = await client.sessions.create(**spec)
    turn = tenuto.TurnReader(await session.send(**{**story.MESSAGE, "max_tool_rounds": 1}))
    async for event in session.stream():
        turn.feed(event)
        if turn.done:
            break
    turn.result()
    settled = next(event for event in turn.events if event.type == "tool.settled")
    first = next(event for event in turn.events if event.type == "model.delta" and event.id > settled.id)
    think = next(event for event in turn.events if event.type == "step.completed" and event.step == first.step)
    await session.cancel()
    return (first.created_at - settled.created_at).total_seconds() * 1000, think.data["kv"]


async def median_times(
    client: tenuto.AsyncClient, context_tokens: int, seed: int, repeats: int, say: Callable[[str], None]
) -> dict[str, float]:
    """Medians of interleaved rounds."""
    rounds = []
    for i in range(repeats):
        rounds.append((await first_token_times(client, context_tokens, seed + i, say))[0])
        await asyncio.sleep(0)
    return {place: statistics.median(r[place] for r in rounds) for place in POLICIES}
