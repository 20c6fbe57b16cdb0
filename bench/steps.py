"""What a step costs beside its model and its tool, and what a session costs that rests.

    python -m bench.steps --evidence DIR

Overhead: a step's wall, from the moment that the workflow schedules it until the workflow has acted on its result, less
the engine's own time or the call's own time in the sandbox; divided by the wall of a bare activity on the same node's
queue, worker and server, in the same round and in the step's place: it does nothing, or nothing but the engine's work,
whose time is left out in the same way. Turns of steps and of bare activities take turns; both meet caches that a model
has just been through.

Parked: sessions that were created, answered one message of one token, and rest. Memory is what the processes grew by;
each session is then woken by another message, two at a time. `--sabotage alter` makes the evidence look better than it
was, which must turn the run red.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import click
import tenuto

from bench import evidence
from bench.evidence import Line
from bench.steps_cost import cost
from bench.steps_figures import figures, misses, report
from bench.steps_parked import parked
from bench.steps_stack import SPANS
from bench.verdict import show, tell
from runtime.cli import ensure_model
from runtime.demo.run import demo_environment
from runtime.demo.stack import running_stack
from runtime.settings import Settings

ROOT = Path(__file__).parent.parent


async def measure(model: str, rounds: int, count: int) -> list[Line]:
    """Every raw measurement of a run, as lines of evidence."""
    home = Path(tempfile.mkdtemp(prefix="tenuto-bench-"))
    spans = home / "spans.jsonl"
    environment = {**demo_environment(home, model), SPANS: str(spans), "PYTHONPATH": str(ROOT)}
    try:
        async with running_stack(environment, tell, ("bench.steps_stack", "up")) as stack:
            async with tenuto.AsyncClient(stack.api_url, stack.api_key) as client:
                lines: list[Line] = [{"kind": "about", "python": sys.version, "load": evidence.load_average()}]
                lines += await cost(stack, client, spans, rounds)
                lines += await parked(stack, client, count) if count else []
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return lines


@click.command()
@click.option("--rounds", type=int, default=30, show_default=True)
@click.option("--parked", "count", type=int, default=10_000, show_default=True)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option(
    "--evidence", "directory", type=click.Path(path_type=Path), help="Leave the raw samples in this directory."
)
@click.option("--sabotage", type=click.Choice(["alter"]), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(rounds: int, count: int, model: str, directory: Path | None, sabotage: str | None, as_json: bool) -> None:
    """A step's overhead, and parked sessions."""
    ensure_model(Settings.load(overrides={"TENUTO_MODEL": model}))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    lines = asyncio.run(measure(model, rounds, count))
    with tempfile.TemporaryDirectory() as spare:
        path = (directory or Path(spare)) / "steps.jsonl"
        evidence.leave(path, lines)
        if sabotage == "alter":
            evidence.alter(path, "step", "inside_s", 0.1)
        figure = figures(*evidence.read(path))
    show(figure, misses(figure), lambda: report(figure), as_json=as_json)


if __name__ == "__main__":
    main()
