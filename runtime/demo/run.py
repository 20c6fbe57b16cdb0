"""The demo from start to end: a fresh stack, the story twice, the timings, and a look at what is left."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tenuto
from rich.console import Console
from rich.table import Table

from engine import EngineClient
from runtime.demo import measure, story
from runtime.demo.play import Played, play, random_kills
from runtime.demo.stack import Stack, leftovers, running_stack
from runtime.demo.watch import Timeline
from runtime.store import Database
from sandbox import BlobStore

KILLED = ("node", "engine")
TOOL_S = (1.5, 6.0, 1.5)


@dataclass(frozen=True)
class DemoOptions:
    seed: int
    temperature: float
    model: str
    context_tokens: int


@dataclass
class Outcome:
    """What the demo found. `good`: every promise held."""

    options: DemoOptions
    steps_repeated: int = 0
    text_equal: bool = False
    left_behind: list[str] = field(default_factory=list)
    ttft_ms: dict[str, float] = field(default_factory=dict)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens_recomputed: int = 0
    tokens: int = 0
    killed: list[dict[str, Any]] = field(default_factory=list)
    reached_nvme: bool = False
    took_s: float = 0.0

    @property
    def good(self) -> bool:
        return self.steps_repeated == 0 and self.text_equal and not self.left_behind

    def as_json(self) -> dict[str, Any]:
        return {
            "steps_repeated": self.steps_repeated,
            "text_equal": self.text_equal,
            "left_behind": len(self.left_behind),
            "ttft_ms": {place: round(ms, 1) for place, ms in self.ttft_ms.items()},
            "tokens_recomputed": self.tokens_recomputed,
            "seed": self.options.seed,
            "model": self.options.model,
            "temperature": self.options.temperature,
            "tokens": self.tokens,
            "reached_nvme": self.reached_nvme,
            "killed": self.killed,
            "sources": self.sources,
            "left": self.left_behind,
            "took_s": round(self.took_s, 1),
        }


async def run_demo(options: DemoOptions, console: Console) -> Outcome:
    began = time.monotonic()
    _stop_on_signals()
    outcome = Outcome(options)
    home = Path(tempfile.mkdtemp(prefix="tenuto-demo-"))
    try:
        environment = demo_environment(home, options.model)
        async with running_stack(environment, lambda text: console.print(f"  {text}", highlight=False)) as stack:
            console.print(f"the stack is up at {stack.api_url}", highlight=False)
            pids = dict(stack.state()["processes"])
            async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
                await _story_twice(stack, client, options, outcome, console)
                outcome.ttft_ms, outcome.sources = await measure.first_token_times(
                    client,
                    stack.settings.model_path,
                    options.context_tokens,
                    options.seed,
                    lambda text: console.print(text, highlight=False),
                )
            outcome.left_behind = await left_in_stack(stack)
            pids |= dict(stack.state()["processes"])
        outcome.left_behind += leftovers(stack, pids)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    outcome.took_s = time.monotonic() - began
    _print_table(outcome, console)
    return outcome


def _stop_on_signals() -> None:
    """A closed terminal or a SIGTERM ends the demo as Ctrl-C does: the stack stops, its home goes."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def demo_environment(home: Path, model: str) -> dict[str, str]:
    """A fresh home with a place outside the workspace where the tools leave a second mark."""
    outside = home / "outside"
    outside.mkdir()
    home.chmod(0o711)
    outside.chmod(0o777)  # tools run as another user
    return {
        "TENUTO_HOME": str(home / "home"),
        "TENUTO_MODEL": model,
        "TENUTO_API_PORT": "0",
        "TENUTO_SANDBOX_VOLUMES": f"{outside}:/mnt/outside",
    }


async def _story_twice(
    stack: Stack, client: tenuto.AsyncClient, options: DemoOptions, outcome: Outcome, console: Console
) -> None:
    spec = story.session(options.seed, options.temperature, long_s=TOOL_S[1], short_s=TOOL_S[0])
    calm, calm_timeline = await _shown(stack, client, spec, [], "undisturbed", console)
    rng = random.Random(options.seed)
    kills = random_kills(rng, KILLED, tool_s=TOOL_S)
    rough, timeline = await _shown(stack, client, spec, kills, "the same seed, with kill -9", console)
    outcome.text_equal = rough.token_ids == calm.token_ids and rough.text == calm.text
    outcome.steps_repeated = calm.repeated + rough.repeated
    outcome.tokens_recomputed = rough.recomputed
    outcome.tokens = len(rough.token_ids)
    outcome.killed = rough.killed
    outcome.reached_nvme = "nvme" in calm_timeline.tiers and "nvme" in timeline.tiers
    console.print(f"\nanswer: {rough.text.strip()}", highlight=False, markup=False)


async def _shown(
    stack: Stack, client: tenuto.AsyncClient, spec: dict[str, Any], kills: list[Any], title: str, console: Console
) -> tuple[Played, Timeline]:
    timeline = Timeline(title, console)
    with timeline.shown():
        played = await play(stack, client, spec, kills=kills, watch=timeline.feed, say=timeline.say)
    return played, timeline


async def left_in_stack(stack: Stack) -> list[str]:
    """What ended sessions still hold in a running stack: sandboxes, snapshots, pages in any tier."""
    async with Database(stack.postgres_dsn) as db:
        rows = await db.fetch("SELECT sandbox_id FROM sandboxes WHERE state <> 'released'")
        open_sessions = await db.fetch(
            "SELECT session_id, state FROM sessions WHERE state NOT IN ('cancelled', 'completed')"
        )
    found = [f"sandbox {row['sandbox_id']}" for row in rows]
    found += [f"session {row['session_id']} is {row['state']}" for row in open_sessions]
    blobs = await asyncio.to_thread(lambda: len(list(BlobStore(stack.settings.blobs_dir))))
    found += [f"{blobs} snapshot blobs"] if blobs else []
    for node, address in stack.engine_addresses.items():
        async with await EngineClient.connect(address) as engine:
            stats = await engine.stats()
        found += [f"{count} pages on {place} of {node}" for place, count in pages_held(stats).items() if count]
    return found


def pages_held(stats: dict[str, Any]) -> dict[str, int]:
    """Pages that sessions hold, per place, from the engine's statistics."""
    return {
        "device": int(stats["pool"]["total"]) - int(stats["pool"]["free"]),
        **{tier: int(stats["tiers"][tier]["pages"]) for tier in ("host", "nvme") if tier in stats["tiers"]},
    }


def _print_table(outcome: Outcome, console: Console) -> None:
    title = "\nwhat it cost (first token: from the end of the tool to the first token after it)"
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    recompute = outcome.ttft_ms.get("recompute", 0.0)
    for place, ms in outcome.ttft_ms.items():
        source = ", ".join(f"{n} {name}" for name, n in outcome.sources[place].items() if n)
        ratio = f"{ms / recompute:.2f} of recompute; " if recompute else ""
        table.add_row(f"first token, KV {place}", f"{ms:.0f} ms", f"{ratio}tokens: {source}")
    table.add_row("tokens recomputed", str(outcome.tokens_recomputed), f"after the kills, of {outcome.tokens}")
    table.add_row(
        "steps repeated", str(outcome.steps_repeated), "by the tools' own marks, in the workspace and outside"
    )
    table.add_row("token ids equal", "yes" if outcome.text_equal else "NO", "to the undisturbed run of the same seed")
    table.add_row("left behind", str(len(outcome.left_behind)), "; ".join(outcome.left_behind))
    table.add_row("took", f"{outcome.took_s:.0f} s", "")
    console.print(table)
