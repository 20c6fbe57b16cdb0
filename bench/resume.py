"""Sessions that are killed at random moments against undisturbed ones of the same seed: the token ids must be equal.

    python -m bench.resume --seeds 20 --evidence DIR

Each seed plays the demo's session twice in one stack, the second time with kill -9 of node and engine in a random
think and a random tool. `--sabotage` must turn a figure red: `noise` plays the second run with another seed,
`repeat` runs one tool call twice behind the ledger's back.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import tenuto

from runtime.cli import ensure_model
from runtime.demo import story
from runtime.demo.play import Kill, outside_log, play, random_kills
from runtime.demo.run import KILLED, demo_environment, left_in_stack
from runtime.demo.stack import Stack, leftovers, running_stack
from runtime.settings import Settings

TOOL_S = (0.5, 2.0, 0.5)


@click.command()
@click.option("--seeds", type=int, default=3, show_default=True)
@click.option("--first-seed", type=int, default=100, show_default=True)
@click.option("--temperature", type=float, default=0.8, show_default=True)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--evidence", type=click.Path(path_type=Path), help="Leave the raw samples in this directory.")
@click.option("--sabotage", type=click.Choice(["noise", "repeat"]), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    seeds: int,
    first_seed: int,
    temperature: float,
    model: str,
    evidence: Path | None,
    sabotage: str | None,
    as_json: bool,
) -> None:
    """Random kills against undisturbed runs."""
    ensure_model(Settings.load(overrides={"TENUTO_MODEL": model}))
    samples, left = asyncio.run(measure(range(first_seed, first_seed + seeds), temperature, model, sabotage))
    figure = figures(samples, left)
    if evidence is not None:
        leave_evidence(evidence, samples, left)
    if as_json:
        click.echo(json.dumps(figure))
    sys.exit(0 if is_green(figure) else 1)


def leave_evidence(directory: Path, samples: list[dict[str, Any]], left: list[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(sample) for sample in samples]
    (directory / "resume.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "resume.left.json").write_text(json.dumps(left))


def figures(samples: list[dict[str, Any]], left: list[str]) -> dict[str, Any]:
    """The figures, recomputed from raw samples alone."""
    equal = sum(s["calm"]["token_ids"] == s["rough"]["token_ids"] for s in samples)
    added = [s["rough"]["took_s"] - s["calm"]["took_s"] for s in samples]
    return {
        "seeds": len(samples),
        "equal": equal,
        "kills": sum(len(kill["pids"]) for s in samples for kill in s["rough"]["killed"]),
        "steps_repeated": sum(s[run]["repeated"] for s in samples for run in ("calm", "rough")),
        "tokens_recomputed": sum(s["rough"]["recomputed"] for s in samples),
        "events_lost_or_repeated": sum(
            s[run]["event_ids"] != list(range(1, len(s[run]["event_ids"]) + 1))
            for s in samples
            for run in ("calm", "rough")
        ),
        "left_behind": len(left),
        "added_s_per_session_p50": round(statistics.median(added), 2) if added else None,
    }


def is_green(figure: dict[str, Any]) -> bool:
    return bool(
        figure["equal"] == figure["seeds"]
        and not figure["steps_repeated"]
        and not figure["events_lost_or_repeated"]
        and not figure["left_behind"]
    )


async def measure(
    seeds: range, temperature: float, model: str, sabotage: str | None
) -> tuple[list[dict[str, Any]], list[str]]:
    home = Path(tempfile.mkdtemp(prefix="tenuto-bench-"))
    samples = []
    try:
        async with running_stack(demo_environment(home, model), lambda _: None) as stack:
            async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
                for seed in seeds:
                    samples.append(await one_seed(stack, client, seed, temperature, sabotage))
                    _tell(samples[-1])
            left = await left_in_stack(stack)
            pids = dict(stack.state()["processes"])
        left += leftovers(stack, pids)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return samples, left


async def one_seed(
    stack: Stack, client: tenuto.AsyncClient, seed: int, temperature: float, sabotage: str | None
) -> dict[str, Any]:
    def spec(used: int) -> dict[str, Any]:
        return story.session(used, temperature, long_s=TOOL_S[1], short_s=TOOL_S[0])

    kills = random_kills(random.Random(seed), KILLED, tool_s=TOOL_S)
    calm = await _timed(stack, client, spec(seed), [])
    repeat = _mark_twice(stack) if sabotage == "repeat" else None
    rough = await _timed(stack, client, spec(seed + 1 if sabotage == "noise" else seed), kills, repeat)
    return {"seed": seed, "temperature": temperature, "calm": calm, "rough": rough}


def _mark_twice(stack: Stack) -> Callable[[tenuto.Event], None]:
    """Leaves the mark that a second run of each call would leave."""

    session_id: list[str] = []

    def watch(event: tenuto.Event) -> None:
        if event.type == "session.created":
            session_id.append(event.data["session_id"])
        if event.type == "tool.settled":
            with outside_log(stack, session_id[0]).open("a") as log:
                log.write(f"{session_id[0]}/{event.step}/{event.data['call']}\n")

    return watch


async def _timed(
    stack: Stack,
    client: tenuto.AsyncClient,
    spec: dict[str, Any],
    kills: list[Kill],
    watch: Callable[[tenuto.Event], None] | None = None,
) -> dict[str, Any]:
    began = time.monotonic()
    played = await play(stack, client, spec, kills=kills, watch=watch or (lambda _: None))
    return {**vars(played), "took_s": time.monotonic() - began}


def _tell(sample: dict[str, Any]) -> None:
    equal = sample["calm"]["token_ids"] == sample["rough"]["token_ids"]
    kills = "; ".join(kill["moment"] for kill in sample["rough"]["killed"])
    repeated = sample["calm"]["repeated"] + sample["rough"]["repeated"]
    click.echo(
        f"seed {sample['seed']}: {'equal' if equal else 'DIFFERENT'}, {len(sample['rough']['token_ids'])} tokens,"
        f" {repeated} repeated, {sample['rough']['recomputed']} recomputed, killed in {kills}"
    )


if __name__ == "__main__":
    main()
