"""The figures of a machine that the simulation needs, measured on an engine that has nothing else to do."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from engine.client import Done, EngineClient, Tokens
from engine.sampling import Sampling

NEAR, FAR = 256, 1024
NEW = 32
REPEATS = 1
DECODED = 33
Samples = dict[str, list[float]]


def tokens_of(rng: random.Random, count: int) -> list[int]:
    """Token ids that mean nothing, of no control token."""
    return [rng.randrange(1000, 40_000) for _ in range(count)]


async def samples(client: EngineClient, seed: int) -> Samples:
    """Seconds of each kind of turn and length, some of each. Taken before and after a trace they span its weather."""
    rng = random.Random(seed)
    seen: Samples = {}
    for repeat in range(REPEATS):
        for length in (NEAR, FAR):
            for source, seconds in (await _one(client, rng, f"calibrate-{seed}-{length}-{repeat}", length)).items():
                seen.setdefault(f"{source}-{length}", []).append(seconds)
    return seen


def calibrated(seen: Samples, bytes_per_token: int) -> dict[str, Any]:
    """`prefill`: [tokens, seconds] to a first token, twice, the shorter first. `again`: [held tokens, new tokens,
    seconds] of a turn whose KV is on the device. Rates in tokens per second, latencies in seconds; of reading, what a
    turn takes longer than that one."""
    took = {name: statistics.median(of) for name, of in seen.items()}
    links = {tier: _line(took, tier) for tier in ("host", "nvme")}
    return {
        "prefill": [[NEAR, took[f"first-{NEAR}"]], [FAR, took[f"first-{FAR}"]]],
        "again": [NEAR + DECODED - 1, NEW + 1, took[f"device-{NEAR}"]],
        "decode_tps": 1 / took[f"decode-{FAR}"],
        **{f"{tier}_tps": rate for tier, (rate, _) in links.items()},
        **{f"{tier}_latency_s": latency for tier, (_, latency) in links.items()},
        "bytes_per_token": bytes_per_token,
    }


async def _one(client: EngineClient, rng: random.Random, name: str, length: int) -> dict[str, float]:
    """Seconds to the first token: from nothing, from the device, from host memory and from NVMe; to decode a token."""
    transcript = tokens_of(rng, length)
    took: dict[str, float] = {}
    took["first"], took["decode"], said = await _turn(client, name, transcript, 0)
    for source in ("device", "host", "nvme"):
        known = len(transcript) + len(said)
        transcript = [*transcript, *said, *tokens_of(rng, NEW)]
        if source != "device":
            await client.kv("offload", session=name, tier=source, wait=True, evict=True)
        took[source], _, said = await _turn(client, name, transcript, known)
    await client.kv("drop", session=name, wait=True)
    return took


async def _turn(client: EngineClient, name: str, transcript: list[int], known: int) -> tuple[float, float, list[int]]:
    sent_s = time.monotonic()
    out: list[int] = []
    first_s = decode_s = 0.0
    async for event in client.generate(
        request_id=f"{name}-{known}", session=name, token_ids=transcript, max_tokens=DECODED,
        sampling=Sampling(temperature=0.0), known_tokens=known,
    ):  # fmt: skip
        if isinstance(event, Tokens):
            first_s = first_s or time.monotonic() - sent_s
            out += event.ids
        elif isinstance(event, Done):
            decode_s = (time.monotonic() - sent_s - first_s) / max(len(out) - 1, 1)
    return first_s, decode_s, out


def _line(took: dict[str, float], tier: str) -> tuple[float, float]:
    """(tokens per second, latency): through what reading the shorter and the longer one took."""
    near, far = (max(took[f"{tier}-{n}"] - took[f"device-{n}"], 1e-5) for n in (NEAR, FAR))
    rate = (FAR - NEAR) / max(far - near, 1e-6)
    return rate, max(near - NEAR / rate, 0.0)
