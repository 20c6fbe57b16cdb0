"""First-token time after a tool, by where the session's KV waited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tenuto

from engine.tokens import load_tokenizer
from runtime.demo import story

POLICIES = {"pinned": "pin", "host": "host", "nvme": "nvme", "recompute": "drop"}
TOOL_S = 1.5  # long enough for the pages to have moved before the tool ends


async def first_token_times(
    client: tenuto.AsyncClient, model_path: Path, context_tokens: int, seed: int, say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Milliseconds from the tool's end to the first token that follows, per place; and where the tokens came from.

    Each place is a session of its own with `context_tokens` of context or more, so that none helps another.
    """
    tokenizer = load_tokenizer(model_path)
    times: dict[str, float] = {}
    sources: dict[str, dict[str, Any]] = {}
    handbooks = {
        place: story.handbook(context_tokens, seed * 10 + number, lambda text: len(tokenizer.encode(text)))
        for number, place in enumerate(POLICIES)
    }
    for number, (place, policy) in enumerate(POLICIES.items()):
        say(f"timing: KV {place}")
        times[place], sources[place] = await _one(client, policy, handbooks[place], seed * 10 + number)
    return times, sources


async def _one(client: tenuto.AsyncClient, policy: str, handbook: str, seed: int) -> tuple[float, dict[str, Any]]:
    spec = story.session(seed, 0.0, long_s=TOOL_S, short_s=TOOL_S)
    spec |= {"system": handbook, "kv": {"on_tool": policy}}
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
