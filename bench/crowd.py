"""A hundred concurrent streams with random disconnects: nothing leaks, nobody starves, no reader holds the engine up.

    python -m bench.crowd --seconds 300 --evidence DIR

Each client sends prompts of random sessions and, at random, reads to the end, stops early, cuts its connection, or
stops reading altogether. Afterwards a sample of what was completed is generated again, alone. `--sabotage` must turn a
figure red: `noise` compares with another seed, `leak` leaves a pin behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

from bench.served import Served, served, tiered
from engine import Done, EngineClient, EngineGone, Preempted, Sampling, Tokens
from engine.wire import encode_frame
from runtime.cli import ensure_model
from runtime.settings import Settings

POOL_TOKENS = 2048
TIER_BYTES = 512 << 20
MOST_RSS_GROWTH = 64 << 20
MOST_OVERTAKEN = 100
VOCAB = 40_000
AGAIN = 20


@dataclass
class Asked:
    """One request: when it was sent and when its tokens came, in seconds since the bench began."""

    number: int
    session: str
    prompt: list[int]
    count: int
    seed: int
    behaviour: str
    sent_s: float
    first_s: float | None = None
    ended_s: float | None = None
    reason: str | None = None
    preempted: int = 0
    tokens: list[int] = field(default_factory=list)


@dataclass
class Evidence:
    asked: list[Asked] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    again: list[dict[str, Any]] = field(default_factory=list)
    left: dict[str, Any] = field(default_factory=dict)


class Streams:
    def __init__(self, engine: Served, clients: int, seconds: float, seed: int) -> None:
        self.engine = engine
        self.clients = clients
        self.evidence = Evidence()
        self._rng = random.Random(seed)
        self._began = time.monotonic()
        self._until = self._began + seconds

    async def run(self, sabotage: str | None) -> Evidence:
        sampler = asyncio.create_task(self._sample())
        async with asyncio.TaskGroup() as group:
            for number in range(self.clients):
                group.create_task(self._client(number))
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
        async with await EngineClient.connect(self.engine.socket) as client:
            await self._rest(client)
            self.evidence.again = await self._again(client, 1 if sabotage == "noise" else 0)
            if sabotage == "leak":
                await client.kv("pin", session="again", wait=True)
            self.evidence.left = await self._sweep(client, spare="again" if sabotage == "leak" else None)
        return self.evidence

    # -- one client -----------------------------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        rng = random.Random(self._rng.random())
        transcript: list[int] = []
        while time.monotonic() < self._until:
            if not transcript or len(transcript) > 500 or rng.random() < 0.3:
                transcript = [rng.randrange(VOCAB) for _ in range(rng.randint(5, 250))]
            asked = self._ask(number, rng, transcript)
            if asked.behaviour == "stall":
                await self._stall(asked)
            else:
                await self._read(asked, rng)
            if asked.reason == "length":
                transcript = [*transcript, *asked.tokens, rng.randrange(VOCAB)]
                if rng.random() < 0.3:
                    await self._offload(asked.session)

    def _ask(self, number: int, rng: random.Random, prompt: list[int]) -> Asked:
        behaviour = rng.choices(["read", "leave", "cut", "stall"], [6, 2, 2, 1])[0]
        asked = Asked(
            len(self.evidence.asked),
            f"c{number}",
            list(prompt),
            rng.randint(4, 120),
            rng.randrange(1 << 30),
            behaviour,
            self._now(),
        )
        self.evidence.asked.append(asked)
        return asked

    async def _read(self, asked: Asked, rng: random.Random) -> None:
        stop_after = rng.randint(1, asked.count) if asked.behaviour != "read" else 1 << 30
        client = await EngineClient.connect(self.engine.socket)
        try:
            async with contextlib.aclosing(self._generate(client, asked)) as events:
                async for event in events:
                    self._note(asked, event)
                    if len(asked.tokens) >= stop_after and asked.reason is None:
                        asked.reason = asked.behaviour
                        if asked.behaviour == "cut":
                            client._writer.transport.abort()
                        break
        except EngineGone:
            asked.reason = asked.reason or "gone"
        finally:
            asked.ended_s = self._now()
            await client.close()

    def _generate(self, client: EngineClient, asked: Asked, session: str | None = None) -> AsyncGenerator[Any, None]:
        return client.generate(
            request_id=f"r{asked.number}" + (session or ""),
            session=session or asked.session,
            token_ids=asked.prompt,
            max_tokens=asked.count,
            sampling=Sampling(temperature=0.7, seed=asked.seed),
            salt=_tenant(asked.session) if session is None else b"again",
        )

    def _note(self, asked: Asked, event: Any) -> None:
        if isinstance(event, Tokens):
            asked.first_s = asked.first_s or self._now()
            asked.tokens += event.ids
        elif isinstance(event, Preempted):
            asked.preempted += 1
        elif isinstance(event, Done):
            asked.reason = event.finish_reason

    async def _stall(self, asked: Asked) -> None:
        """Send the request and never read a byte, for a while."""
        reader, writer = await asyncio.open_unix_connection(str(self.engine.socket), limit=1)
        message = {
            "type": "generate",
            "id": 1,
            "request_id": f"r{asked.number}",
            "session": asked.session,
            "token_ids": asked.prompt,
            "max_tokens": 400,
            "salt": _tenant(asked.session).hex(),
        }
        writer.write(encode_frame(message))
        await writer.drain()
        await asyncio.sleep(random.Random(asked.number).uniform(0.2, 3.0))  # a reader that does nothing has no event
        writer.transport.abort()
        asked.reason, asked.ended_s = "stall", self._now()
        del reader

    async def _offload(self, session: str) -> None:
        async with await EngineClient.connect(self.engine.socket) as client:
            await client.kv("offload", session=session, tier="host", salt=_tenant(session))

    # -- watching -------------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        process = psutil.Process(self.engine.pid)
        async with await EngineClient.connect(self.engine.socket) as client:
            while True:
                stats = await client.stats()
                self.evidence.samples.append(
                    {
                        "at_s": self._now(),
                        "steps": stats["steps"],
                        "running": stats["running"],
                        "waiting": stats["waiting"],
                        "integrity": stats["integrity"],
                        "preemptions": stats["counters"]["preemptions"],
                        "rss": process.memory_info().rss,
                        "fds": process.num_fds(),
                        "threads": process.num_threads(),
                    }
                )
                await asyncio.sleep(1.0)

    async def _rest(self, client: EngineClient) -> None:
        """Until the engine has noticed that all clients are gone."""
        while True:
            stats = await client.stats()
            if not stats["running"] and not stats["waiting"]:
                return
            await asyncio.sleep(0.05)

    async def _again(self, client: EngineClient, other_seed: int) -> list[dict[str, Any]]:
        whole = [asked for asked in self.evidence.asked if asked.reason in ("length", "stop") and asked.tokens]
        chosen = self._rng.sample(whole, min(AGAIN, self.clients // 2, len(whole)))
        for asked in chosen:
            asked.seed += other_seed
        out = []
        for asked in chosen:
            tokens: list[int] = []
            async for event in self._generate(client, asked, session="again"):
                if isinstance(event, Tokens):
                    tokens += event.ids
            out.append({"number": asked.number, "tokens": tokens})
        return out

    async def _sweep(self, client: EngineClient, spare: str | None) -> dict[str, Any]:
        """Drop every session; what is still there then has leaked."""
        for session in [*(f"c{number}" for number in range(self.clients)), "again"]:
            if session != spare:
                await client.kv("drop", session=session, wait=True)
        stats = await client.stats()
        process = psutil.Process(self.engine.pid)
        return {
            "held": stats["pool"]["held"],
            "used": stats["pool"]["total"] - stats["pool"]["free"],
            "pinned": stats["pinned_pages"],
            "host": stats["tiers"]["host"]["pages"],
            "nvme": stats["tiers"]["nvme"]["pages"],
            "integrity": stats["integrity"],
            "fds": process.num_fds(),
        }

    def _now(self) -> float:
        return round(time.monotonic() - self._began, 4)


def _tenant(session: str) -> bytes:
    return bytes([int(session[1:]) % 3])


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures, recomputed from raw evidence alone."""
    asked = [line for line in lines if line["kind"] == "asked"]
    samples = [line for line in lines if line["kind"] == "sample"]
    again = {line["number"]: line["tokens"] for line in lines if line["kind"] == "again"}
    (left,) = (line for line in lines if line["kind"] == "left")
    said = {line["number"]: line["tokens"] for line in asked}
    third = samples[len(samples) // 3 :] or samples
    return {
        "requests": len(asked),
        "disconnects": sum(line["behaviour"] in ("cut", "stall") for line in asked),
        "tokens": sum(len(line["tokens"]) for line in asked),
        "preemptions": samples[-1]["preemptions"] if samples else 0,
        "compared": len(again),
        "different": sum(said[number] != tokens for number, tokens in again.items()),
        "never_served": sum(line["reason"] in (None, "gone") for line in asked),
        "most_overtaken": most_overtaken(asked),
        "standstills": standstills(samples),
        "broken_books": sum(sample["integrity"] != "ok" for sample in [*samples, left]),
        "pages_left": left["used"] + left["host"] + left["nvme"],
        "fds_left": max(0, left["fds"] - samples[0]["fds"]) if samples else 0,
        "rss_growth_mb": round((third[-1]["rss"] - third[0]["rss"]) / 1e6, 1) if third else 0.0,
    }


def most_overtaken(asked: list[dict[str, Any]]) -> int:
    """Over all requests: how many that were sent later had their first token earlier."""
    served_ = [(line["sent_s"], line["first_s"]) for line in asked if line["first_s"] is not None]
    return max((sum(sent > s and first < f for sent, first in served_) for s, f in served_), default=0)


def standstills(samples: list[dict[str, Any]]) -> int:
    """Pairs of samples, a second apart, between which someone ran and no step was taken."""
    pairs = itertools.pairwise(samples)
    return sum(a["running"] > 0 and b["running"] > 0 and a["steps"] == b["steps"] for a, b in pairs)


def is_green(figure: dict[str, Any]) -> bool:
    return bool(
        figure["compared"]
        and not figure["different"]
        and not figure["never_served"]
        and figure["most_overtaken"] <= MOST_OVERTAKEN
        and not figure["standstills"]
        and not figure["broken_books"]
        and not figure["pages_left"]
        and not figure["fds_left"]
        and figure["rss_growth_mb"] * 1e6 <= MOST_RSS_GROWTH
    )


def as_lines(evidence: Evidence) -> list[dict[str, Any]]:
    return [
        *({"kind": "asked", **asdict(asked)} for asked in evidence.asked),
        *({"kind": "sample", **sample} for sample in evidence.samples),
        *({"kind": "again", **again} for again in evidence.again),
        {"kind": "left", **evidence.left},
    ]


async def measure(model: Path, clients: int, seconds: float, seed: int, sabotage: str | None) -> list[dict[str, Any]]:
    root = Path(tempfile.mkdtemp(prefix="tenuto-bench-"))
    try:
        async with served(model, root, **tiered(root, POOL_TOKENS, TIER_BYTES)) as engine:
            return as_lines(await Streams(engine, clients, seconds, seed).run(sabotage))
    finally:
        shutil.rmtree(root, ignore_errors=True)


@click.command()
@click.option("--seconds", type=float, default=300.0, show_default=True)
@click.option("--clients", type=int, default=100, show_default=True)
@click.option("--seed", type=int, default=7, show_default=True)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--evidence", type=click.Path(path_type=Path), help="Leave the raw samples in this directory.")
@click.option("--sabotage", type=click.Choice(["noise", "leak"]), help="Break a promise on purpose.")
def main(seconds: float, clients: int, seed: int, model: str, evidence: Path | None, sabotage: str | None) -> None:
    """Random streams against one engine; one JSON object on the last line."""
    ensure_model(Settings.load(overrides={"TENUTO_MODEL": model}))
    path = Settings.load().models_dir / f"{model}.gguf"
    lines = asyncio.run(measure(path, clients, seconds, seed, sabotage))
    if evidence is not None:
        evidence.mkdir(parents=True, exist_ok=True)
        (evidence / "crowd.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = figures(lines)
    click.echo(json.dumps(figure))
    sys.exit(0 if is_green(figure) else 1)


if __name__ == "__main__":
    main()
