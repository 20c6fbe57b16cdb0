"""What a long prompt does to the streams beside it: gaps between tokens, as a client of a real engine sees them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.evidence import Line, load_average
from bench.served import served
from engine.client import EngineClient, Tokens

STREAMS, CONTEXT, PROMPT = 8, 128, 4096
_CALM_TOKENS = 60  # per stream, before and again in the calm window
_IDS = (3, 256)  # as in the columns
_POOL_TOKENS = 16_384


@dataclass
class Stream:
    """Moments, in seconds, at which tokens of one stream arrived. A stream that ends begins again."""

    moments: list[float] = field(default_factory=list)
    breaks: set[int] = field(default_factory=set)  # indices of moments that follow no token of the same generation

    def gaps_ms(self, after: float, until: float) -> list[float]:
        """Gaps that end in the window and begin in it, or, for what was already waiting at its start, before it."""
        pairs = enumerate(itertools.pairwise(self.moments), start=1)
        return [
            round(1e3 * (end - start), 3)
            for index, (start, end) in pairs
            if after <= end <= until and index not in self.breaks
        ]


async def measure(
    model: Path, dtype: str, *, threads: int, repeats: int, prompt: int = PROMPT, stalled: bool = False
) -> list[Line]:
    """Per repeat one line of gaps with nothing else running, and one of gaps while a prompt is prefilled.

    Raises BenchError where the engine does not start. `stalled`: stop the engine's process again and again beside the
    prompt, to see that the figure notices.
    """
    lines: list[Line] = []
    async with _engine(model, dtype, threads) as (client, pid):
        for repeat in range(repeats):
            streams = [Stream() for _ in range(STREAMS)]
            tasks = [
                asyncio.create_task(_flow(client, stream, f"{repeat}-{index}")) for index, stream in enumerate(streams)
            ]
            try:
                await _until(streams, tasks, _CALM_TOKENS)
                calm = time.monotonic()
                await _until(streams, tasks, _CALM_TOKENS)
                began = time.monotonic()
                async with _stalling(pid if stalled else None):
                    await _first_token(client, prompt, repeat)
                ended = time.monotonic()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for window, after, until in (("calm", calm, began), ("beside", began, ended)):
                gaps = [gap for stream in streams for gap in stream.gaps_ms(after, until)]
                lines.append(_line(dtype, repeat, window, until - after, gaps))
    return lines


def _line(dtype: str, repeat: int, window: str, seconds: float, gaps_ms: Sequence[float]) -> Line:
    return {
        "kind": "gaps",
        "dtype": dtype,
        "repeat": repeat,
        "window": window,
        "seconds": seconds,
        "gaps_ms": list(gaps_ms),
        "load": load_average(),
    }


async def _flow(client: EngineClient, stream: Stream, name: str) -> None:
    draw = random.Random(name)
    for number in itertools.count():
        stream.breaks.add(len(stream.moments))
        ids = [draw.randrange(*_IDS) for _ in range(CONTEXT)]
        events = client.generate(
            request_id=f"{name}-{number}", session=f"{name}-{number}", token_ids=ids, max_tokens=512
        )
        async for event in events:
            if isinstance(event, Tokens):
                stream.moments.append(time.monotonic())


async def _until(streams: Sequence[Stream], tasks: Sequence[asyncio.Task[None]], tokens: int) -> None:
    """Wait until every stream has that many tokens more."""
    wanted = [len(stream.moments) + tokens for stream in streams]
    while any(len(stream.moments) < count for stream, count in zip(streams, wanted, strict=True)):
        for task in tasks:
            if task.done():
                await task
        await asyncio.sleep(0.01)


async def _first_token(client: EngineClient, prompt: int, repeat: int) -> None:
    draw = random.Random(f"prompt {repeat}")
    ids = [draw.randrange(*_IDS) for _ in range(prompt)]
    events = client.generate(request_id=f"long-{repeat}", session=f"long-{repeat}", token_ids=ids, max_tokens=1)
    async for _ in events:
        pass


@contextlib.asynccontextmanager
async def _stalling(pid: int | None) -> AsyncIterator[None]:
    if pid is None:
        yield
        return
    task = asyncio.create_task(_stall(pid))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _stall(pid: int) -> None:
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.03)
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def _engine(model: Path, dtype: str, threads: int) -> AsyncIterator[tuple[EngineClient, int]]:
    """A client of a real engine process, and its pid."""
    with tempfile.TemporaryDirectory(prefix="tenuto-bench-") as directory:
        async with served(model, Path(directory), dtype=dtype, threads=threads, kv_tokens=_POOL_TOKENS) as engine:
            async with await EngineClient.connect(engine.socket) as client:
                yield client, engine.pid
