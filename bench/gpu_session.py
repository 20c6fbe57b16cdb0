"""A session end to end: it thinks, its KV leaves for host memory and NVMe while a tool runs, the engine is killed, a
new one adopts the tiers, and the session thinks on: with the tokens that it gives undisturbed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
from pathlib import Path

from bench.gpu_course import Course
from bench.gpu_random import SMALL, TINY, write_model
from bench.served import served, tiered
from bench.wake_hear import Heard, hear
from engine import EngineClient

_PROMPT, _DRY_PROMPT = 2000, 48
_ANSWER, _DRY_ANSWER = 32, 4
_RESULT, _DRY_RESULT = 200, 20


def session(course: Course) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_session(course, Path(directory)))


async def _session(course: Course, root: Path) -> None:
    shape = TINY if course.dry else SMALL
    model = write_model(root / "model.gguf", shape)
    draw = random.Random(23)
    lengths = (_DRY_PROMPT, _DRY_RESULT) if course.dry else (_PROMPT, _RESULT)
    prompt, result = ([draw.randrange(3, 259) for _ in range(length)] for length in lengths)
    count = _DRY_ANSWER if course.dry else _ANSWER
    pool = shape.context if course.dry else 2 * shape.context
    options = {**tiered(root, pool, 64 << 20 if course.dry else 2 << 30), "backend": "triton", "kv_admission": "always"}
    calm: list[list[int]] = []
    hit: list[list[int]] = []
    async with served(model, root, **options) as engine, await EngineClient.connect(engine.socket) as client:
        first = await hear(client, "calm", prompt, count, salt=b"calm")
        second = await hear(client, "calm", prompt + first.tokens + result, count, salt=b"calm")
        calm = [first.tokens, second.tokens]
        await client.kv("drop", session="calm", salt=b"calm", wait=True)
        first = await hear(client, "hit", prompt, count, salt=b"hit")
        hit.append(first.tokens)
        for tier in ("nvme", "host"):
            receipt = await client.kv("offload", session="hit", salt=b"hit", tier=tier, wait=True, evict=tier == "host")
            course.say("receipt", tier=tier, status=receipt.status, pages=receipt.pages, bytes=receipt.bytes)
        os.kill(engine.pid, signal.SIGKILL)
    async with served(model, root, **options) as engine, await EngineClient.connect(engine.socket) as client:
        transcript = prompt + first.tokens + result
        heard = await hear(client, "hit", transcript, count, salt=b"hit", known=len(prompt + first.tokens))
        hit.append(heard.tokens)
    _tell(course, calm, hit, second, heard)


def _tell(course: Course, calm: list[list[int]], hit: list[list[int]], undisturbed: Heard, restored: Heard) -> None:
    course.say(
        "session",
        calm=calm,
        hit=hit,
        sources=restored.sources,
        first_token_s=restored.first_token_s,
        undisturbed_first_token_s=undisturbed.first_token_s,
    )
