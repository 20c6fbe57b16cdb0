"""Sessions at a planned maximum, and clearly above it, against a real engine whose pool is the plan's."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.evidence import Line
from bench.served import served
from engine.client import EngineClient, Tokens

_IDS = (3, 256)  # ids that every model has


@dataclass(frozen=True)
class Load:
    """`sessions` have `prompt` tokens behind them and ask for `output` more, all at once."""

    what: str
    sessions: int
    prompt: int
    output: int
    slo_s: float


async def run(model: Path, pool_tokens: int, threads: int, loads: list[Load], rounds: int) -> list[Line]:
    """A line for each load and round: seconds for a token of each session, from its request to its last one."""
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="tenuto-bench-") as directory:
        async with served(model, Path(directory), threads=threads, kv_tokens=pool_tokens) as engine:
            async with await EngineClient.connect(engine.socket) as client:
                for turn in range(rounds):
                    for load in loads:
                        lines.append(await _one(client, load, turn))
    return lines


async def _one(client: EngineClient, load: Load, turn: int) -> Line:
    """First the prompts, so that only decoding is timed; then everybody at once."""
    names = [f"{load.what}-{turn}-{number}" for number in range(load.sessions)]
    for name in names:
        await _generate(client, name, _prompt(name, load.prompt), 1)
    took = await asyncio.gather(*(_generate(client, name, _prompt(name, load.prompt), load.output) for name in names))
    for name in names:
        await client.kv("drop", session=name, wait=True)
    return {
        "kind": "load",
        "what": load.what,
        "sessions": load.sessions,
        "slo_s": load.slo_s,
        "output": load.output,
        "seconds_per_token": [round(one / load.output, 6) for one in took],
    }


def _prompt(name: str, tokens: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(*_IDS) for _ in range(tokens)]


async def _generate(client: EngineClient, session: str, prompt: list[int], output: int) -> float:
    """Seconds until so many tokens have come, whatever they are: one that ends early begins again."""
    begun, count, tries = time.perf_counter(), 0, 0
    ids = list(prompt)
    while count < output:
        tries += 1
        events = client.generate(
            request_id=f"{session}-{output}-{tries}", session=session, token_ids=ids, max_tokens=output - count
        )
        async for event in events:
            if isinstance(event, Tokens):
                count += len(event.ids)
                ids += event.ids
    return time.perf_counter() - begun
