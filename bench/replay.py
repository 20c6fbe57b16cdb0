"""Recorded agent sessions through the real engine, with tiers and without, over a pool that is too small for all.

    python -m bench.replay --evidence DIR

Lengths are recorded, token ids are not: prompt, tool results and what of the assistant's turn is not decoded are
drawn, and each tool result ends with a piece of the transcript, so that the next tokens depend on what is far back.
Keys and values are really computed. Pauses are compressed; during one, the policy is the runtime's: to the host at
once, to NVMe after a while, a prefetch when the tool has ended and the generation right behind it. Several sessions
play at the same time; each group of them plays in both engines, in turns. Durations that a recording lacks are drawn.

`--trace FILE` replays other recordings: a JSON object per line with `id`, `messages` and `tool_seconds`.
`--sabotage foreign` must turn the figure red: with tiers, one session has another prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench import evidence
from bench.compiled import BenchError
from bench.evidence import Line
from bench.replay_figures import figures, misses, report
from bench.replay_play import MODES, TIERS, Player
from bench.replay_sessions import Recorded, from_shapes, from_trace
from bench.served import served
from bench.verdict import show, tell
from engine import EngineClient
from engine.modelfile import model_name
from engine.tokens import load_tokenizer
from runtime.cli import ensure_model
from runtime.settings import Settings

_TIER_BYTES = 2 << 30
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Wanted:
    """One run. `trace` None: the shapes in bench/data."""

    model: Path
    trace: Path | None
    sessions: int
    together: int
    turns: int
    pool_tokens: int
    scale: float
    threads: int
    sabotage: str | None


async def measure(wanted: Wanted) -> list[Line]:
    """Every raw measurement of a run, as lines of evidence. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="tenuto-bench-") as directory:
        async with _engines(wanted, Path(directory)) as clients:
            recorded = _recorded(wanted, clients[TIERS].card.context_length)
            lines = [_about(wanted, recorded)]
            for start in range(0, len(recorded), wanted.together):
                group = recorded[start : start + wanted.together]
                for mode in MODES if start // wanted.together % 2 else MODES[::-1]:
                    tell(f"sessions {start + 1} to {start + len(group)} of {len(recorded)}, {mode}")
                    lines += await _play(wanted, clients[mode], mode, group)
            for mode in MODES:
                lines.append({"kind": "after", "mode": mode, "integrity": (await clients[mode].stats())["integrity"]})
    return lines


async def _play(wanted: Wanted, client: EngineClient, mode: str, group: Sequence[Recorded]) -> list[Line]:
    foreign = wanted.sabotage == "foreign" and mode == TIERS
    async with asyncio.TaskGroup() as tasks:
        played = [
            tasks.create_task(Player(client, mode, wanted.scale, foreign and not number).play(session))
            for number, session in enumerate(group)
        ]
    return [line for task in played for line in task.result()]


def _recorded(wanted: Wanted, context: int) -> list[Recorded]:
    """Raises BenchError where a session does not fit the pool."""
    if wanted.trace is None:
        found = from_shapes()
    else:
        tokenizer = load_tokenizer(wanted.model)
        found = from_trace(wanted.trace, lambda text: len(tokenizer.encode(text)))
    room = min(context, wanted.pool_tokens - 64)
    cut = [session.cut(wanted.turns, room) for session in found[: wanted.sessions]]
    if any(not session.steps for session in cut):
        raise BenchError(f"a session has no turn that fits {room} tokens; raise --pool-tokens")
    return cut


@contextlib.asynccontextmanager
async def _engines(wanted: Wanted, root: Path) -> AsyncIterator[dict[str, EngineClient]]:
    """A client by mode, each of an engine of its own."""
    async with contextlib.AsyncExitStack() as stack:
        arena = stack.enter_context(tempfile.TemporaryDirectory(dir=_SHM if _SHM.is_dir() else root))
        tiers = {"host_arena": Path(arena) / "kv", "host_bytes": _TIER_BYTES}
        tiers |= {"nvme_dir": root / "nvme", "nvme_bytes": _TIER_BYTES}
        clients = {}
        for mode in MODES:
            (root / mode).mkdir()
            options: dict[str, Any] = {"threads": wanted.threads, "kv_tokens": wanted.pool_tokens}
            options |= tiers if mode == TIERS else {}
            engine = await stack.enter_async_context(served(wanted.model, root / mode, **options))
            clients[mode] = await stack.enter_async_context(await EngineClient.connect(engine.socket))
        yield clients


def _about(wanted: Wanted, recorded: Sequence[Recorded]) -> Line:
    return {
        "kind": "about",
        "model": model_name(wanted.model),
        "from": "bench/data" if wanted.trace is None else wanted.trace.name,
        "together": wanted.together,
        "pool_tokens": wanted.pool_tokens,
        "scale": wanted.scale,
        "threads": wanted.threads,
        "sabotage": wanted.sabotage,
        "turns": {session.name: len(session.steps) for session in recorded},
        "load": evidence.load_average(),
    }


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Recordings of your own.")
@click.option("--sessions", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--together", type=click.IntRange(min=1), default=4, show_default=True, help="Sessions at the same time.")
@click.option("--turns", type=click.IntRange(min=1), default=4, show_default=True, help="Of a session, at most.")
@click.option("--pool-tokens", type=click.IntRange(min=1024), default=8192, show_default=True)
@click.option("--scale", type=click.FloatRange(min=0), default=0.05, show_default=True, help="Of a recorded second.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--evidence", "directory", type=click.Path(path_type=Path), default=Path("bench/out"), show_default=True)
@click.option("--sabotage", type=click.Choice(["foreign"]), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(directory: Path, as_json: bool, model: str, **options: Any) -> None:
    """Recorded agent sessions, with tiers and without."""
    settings = Settings.load(overrides={"TENUTO_MODEL": model})
    ensure_model(settings)
    path = directory / "replay.jsonl"
    try:
        evidence.leave(path, asyncio.run(measure(Wanted(settings.model_path, **options))))
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    lines, sealed = evidence.read(path)
    figure = figures(lines, sealed)
    show(figure, misses(figure), lambda: report(lines, figure), as_json=as_json)


if __name__ == "__main__":
    main()
