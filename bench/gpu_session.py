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
from bench.wake_hear import hear
from engine import EngineClient

TIERS = ("host", "nvme")
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
    async with served(model, root, **options) as engine, await EngineClient.connect(engine.socket) as client:
        calm = [await hear(client, "calm", prompt, count, salt=b"calm")]
        transcript = prompt + calm[0].tokens + result
        calm.append(await hear(client, "calm", transcript, count, salt=b"calm"))
        await client.kv("drop", session="calm", salt=b"calm", wait=True)
        before = {tier: await _leave(course, client, tier, prompt, count) for tier in TIERS}
        os.kill(engine.pid, signal.SIGKILL)
    async with served(model, root, **options) as engine, await EngineClient.connect(engine.socket) as client:
        for tier in TIERS:
            known = len(prompt) + count - 1  # the last token of an answer has not been through the model yet
            heard = await hear(client, tier, prompt + before[tier] + result, count, salt=tier.encode(), known=known)
            course.say(
                "session",
                tier=tier,
                undisturbed=[one.tokens for one in calm],
                killed=[before[tier], heard.tokens],
                sources=heard.sources,
                first_token_s=heard.first_token_s,
                undisturbed_first_token_s=calm[1].first_token_s,
            )


async def _leave(course: Course, client: EngineClient, tier: str, prompt: list[int], count: int) -> list[int]:
    """A session thinks, and its pages go where its name says. Returns its tokens."""
    heard = await hear(client, tier, prompt, count, salt=tier.encode())
    receipt = await client.kv("offload", session=tier, salt=tier.encode(), tier=tier, wait=True, evict=True)
    course.say("receipt", tier=tier, status=receipt.status, pages=receipt.pages, bytes=receipt.bytes)
    return heard.tokens
