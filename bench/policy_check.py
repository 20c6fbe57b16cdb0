"""The simulator against the real engine: small traces, played by the one and simulated by the other.

    python -m bench.policy_check --json

Sessions share a pool that does not hold them all. When a tool starts, a session's KV is copied to host memory or to
NVMe, is dropped, or stays; the pool evicts what it has to. The simulation gets the arrivals, where each turn's KV came
from, and the machine's figures as they were measured on the same engine just before and after; it answers when each
first token comes.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from bench.policy_calibrate import calibrated, samples, tokens_of
from bench.policy_replay import compared, is_close
from bench.served import served, tiered
from engine.client import Done, EngineClient, Prefill, Tokens
from engine.sampling import Sampling
from runtime.cli import ensure_model
from runtime.settings import Settings

POOL_TOKENS = 2048
TIER_BYTES = 512 << 20
KEPT_IN = ("host", "nvme", "device", "nowhere")
"""Where a session's KV is kept while its tool runs, turn after turn: on the device if the pool has the room."""
OUT_TOKENS = 8
PAUSE_S = 3.0
"""Scale of the pauses: the engine is neither idle nor swamped."""


class Trace:
    """Plays sessions against an engine and logs what happened, in seconds since the trace began."""

    def __init__(self, client: EngineClient, seed: int) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.log: list[dict[str, Any]] = []
        self._began_s = time.monotonic()

    async def play(self, sessions: int, turns: int) -> list[dict[str, Any]]:
        async with asyncio.TaskGroup() as group:
            for number in range(sessions):
                group.create_task(self._session(number, turns, random.Random(self.rng.random())))
        for number in range(sessions):
            await self.client.kv("drop", session=f"s{number}", wait=True)
        return sorted(self.log, key=lambda line: float(line["at_s"]))

    async def _session(self, number: int, turns: int, rng: random.Random) -> None:
        name, known = f"s{number}", 0
        transcript = tokens_of(rng, rng.randint(150, 450))
        await asyncio.sleep(rng.uniform(0, 3 * PAUSE_S))
        for turn in range(turns):
            transcript += await self._turn(name, transcript, known)
            known = len(transcript)
            self._note("tool_started", name, tokens=known)
            await self._keep(name, KEPT_IN[(number + turn) % len(KEPT_IN)])
            await asyncio.sleep(rng.uniform(0.2, 1.8) * PAUSE_S)  # the tool's own time
            transcript += tokens_of(rng, rng.randint(20, 120))

    async def _turn(self, name: str, transcript: list[int], known: int) -> list[int]:
        sent_s = self._note("tool_ended", name, tokens=known, new_tokens=len(transcript) - known)
        out: list[int] = []
        held: dict[str, int] = {}
        async for event in self.client.generate(
            request_id=f"{name}-{known}", session=name, token_ids=transcript, max_tokens=OUT_TOKENS,
            sampling=Sampling(temperature=0.0), known_tokens=known,
        ):  # fmt: skip
            if isinstance(event, Prefill):
                held = {tier: getattr(event, tier) for tier in ("device", "host", "nvme", "recomputed", "computed")}
            elif isinstance(event, Tokens):
                if not out:
                    seconds = time.monotonic() - self._began_s - sent_s
                    self._note("first_token", name, tokens=len(transcript), held=held, seconds=round(seconds, 5))
                out += event.ids
            elif isinstance(event, Done) and event.finish_reason == "cancelled":
                raise RuntimeError(f"the turn of {name} was cancelled")
        return out

    async def _keep(self, name: str, place: str) -> None:
        if place == "nowhere":
            await self.client.kv("drop", session=name, wait=True)
        elif place != "device":
            await self.client.kv("offload", session=name, tier=place, wait=True)

    def _note(self, kind: str, session: str, **facts: Any) -> float:
        at_s = time.monotonic() - self._began_s
        self.log.append({"at_s": round(at_s, 5), "session": session, "kind": kind, **facts})
        return at_s


async def measure(model: Path, rounds: int, sessions: int, turns: int, seed: int) -> list[dict[str, Any]]:
    """The log of some traces, each after a line that is the machine as it was measured before and after that trace:
    others may be at work on the same cores, so speed is no constant."""
    root = Path(tempfile.mkdtemp(prefix="tenuto-bench-"))
    try:
        async with (
            served(model, root, **tiered(root, POOL_TOKENS, TIER_BYTES)) as engine,
            await EngineClient.connect(engine.socket) as client,
        ):
            log: list[dict[str, Any]] = []
            before = await samples(client, 0)
            for number in range(rounds):
                played = await Trace(client, seed + number).play(sessions, turns)
                after = await samples(client, number + 1)
                both = {name: [*before[name], *after[name]] for name in before}
                machine = calibrated(both, client.card.kv_bytes_per_token)
                log += [{"kind": "machine", "out_tokens": OUT_TOKENS, **machine}, *played]
                before = after
            return log
    finally:
        shutil.rmtree(root, ignore_errors=True)


@click.command()
@click.option("--rounds", type=int, default=4, show_default=True)
@click.option("--sessions", type=int, default=6, show_default=True)
@click.option("--turns", type=int, default=6, show_default=True)
@click.option("--seed", type=int, default=3, show_default=True)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--evidence", type=click.Path(path_type=Path), help="Leave the log in this directory.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(rounds: int, sessions: int, turns: int, seed: int, model: str, evidence: Path | None, as_json: bool) -> None:
    """Measured against simulated first-token times, by where the KV came from."""
    ensure_model(Settings.load(overrides={"TENUTO_MODEL": model}))
    log = asyncio.run(measure(Settings.load().models_dir / f"{model}.gguf", rounds, sessions, turns, seed))
    if evidence is not None:
        evidence.mkdir(parents=True, exist_ok=True)
        (evidence / "policy_check.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    figure = compared(log)
    for source, of in figure["sources"].items():
        told = f"measured {of['measured_s']:.3f} s, simulated {of['simulated_s']:.3f} s"
        deviations = f"{of['deviation']:+.1%}, at the trace's own speed {of['fair_deviation']:+.1%}"
        click.echo(f"{source:<10} {of['turns']:3} turns: {told} ({deviations})")
    if as_json:
        click.echo(json.dumps(figure))
    sys.exit(0 if is_close(figure) else 1)


if __name__ == "__main__":
    main()
