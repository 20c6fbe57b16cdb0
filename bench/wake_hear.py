"""One generation as a client of the engine sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine import EngineClient, Preempted, Prefill, Resumed, Tokens

SOURCES = ("computed", "device", "host", "nvme", "shared", "recomputed")


@dataclass
class Heard:
    """Seconds from the send to the first token frame, the tokens, where the prompt's KV came from (in tokens; what a
    preempted generation fetched again counts again), and how often it was preempted."""

    first_token_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    preempted: int = 0


async def hear(
    client: EngineClient,
    session: str,
    tokens: Sequence[int],
    count: int,
    *,
    request_id: str | None = None,
    salt: bytes = b"",
    known: int = 0,
) -> Heard:
    """Run a greedy generation to its end."""
    heard, began = Heard(), time.perf_counter()
    async for event in client.generate(
        request_id=request_id or f"{session}-{len(tokens)}",
        session=session,
        token_ids=tokens,
        max_tokens=count,
        salt=salt,
        known_tokens=known,
    ):
        if isinstance(event, Tokens):
            heard.first_token_s = heard.first_token_s or time.perf_counter() - began
            heard.tokens += event.ids
        elif isinstance(event, Prefill | Resumed):
            for name, count_of in vars(event).items():
                heard.sources[name] += count_of
        elif isinstance(event, Preempted):
            heard.preempted += 1
    return heard
