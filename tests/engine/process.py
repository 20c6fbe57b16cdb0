"""Real engine processes for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.client import Done, EngineClient, Prefill, Tokens
from engine.sampling import Sampling


@dataclass
class Process:
    """An engine that has said it is ready."""

    child: asyncio.subprocess.Process
    ready: dict[str, Any]
    socket: Path
    progress: list[dict[str, Any]] = field(default_factory=list)

    async def stop(self, number: int) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(number)
        return await self.child.wait()


def _words(model: Path, root: Path, options: dict[str, Any]) -> list[str]:
    socket = root / "engine.sock"
    arguments = {
        "model": model,
        "socket": socket,
        "kv-tokens": 1024,
        "kv-admission": "always",  # a tiny model computes sooner than any tier reads
        "host-arena": root / "arena",
        "host-bytes": 256 << 20,
        "nvme-dir": root / "nvme",
        "nvme-bytes": 256 << 20,
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    return [part for name, value in arguments.items() for part in (f"--{name}", str(value))]


async def refusal(model: Path, root: Path, **options: Any) -> tuple[int, list[dict[str, Any]]]:
    """Of an engine that does not start: its exit status, and what it said on its way."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "engine", *_words(model, root, options), stderr=asyncio.subprocess.PIPE
    )
    _, said = await child.communicate()
    assert child.returncode is not None
    return child.returncode, [json.loads(line) for line in said.splitlines() if line.startswith(b"{")]


@contextlib.asynccontextmanager
async def engine(model: Path, root: Path, **options: Any) -> AsyncIterator[Process]:
    """`python -m engine`, its files under `root`; killed at the end if it still runs."""
    flat = _words(model, root, options)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "engine", *flat, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    lines: list[dict[str, Any]] = []
    reader = asyncio.create_task(_collect(child.stderr, lines))
    try:
        line = await child.stdout.readline()
        assert line, f"the engine did not start: {lines}"
        yield Process(child, json.loads(line), root / "engine.sock", lines)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await reader


async def _collect(stream: asyncio.StreamReader, lines: list[dict[str, Any]]) -> None:
    async for line in stream:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))


@dataclass
class Heard:
    """What a generation said."""

    prefill: Prefill | None = None
    tokens: list[int] = field(default_factory=list)
    done: Done | None = None


async def hear(client: EngineClient, session: str, tokens: Sequence[int], count: int, **fields: Any) -> Heard:
    """Run a generation to its end."""
    heard = Heard()
    fields.setdefault("request_id", f"{session}-{len(tokens)}-{count}")
    fields.setdefault("sampling", Sampling(temperature=0.8, seed=11))
    async for event in client.generate(session=session, token_ids=tokens, max_tokens=count, **fields):
        if isinstance(event, Prefill):
            heard.prefill = event
        elif isinstance(event, Tokens):
            heard.tokens += event.ids
        elif isinstance(event, Done):
            heard.done = event
    return heard
