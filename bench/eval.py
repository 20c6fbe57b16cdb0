"""What a quantised mode loses that perplexity misses: tool calls and exact answers, beside fp32 of the same model.

    python -m bench.eval --json

Every mode makes the same tool calls, under the engine's own grammar and greedily, and answers the same questions;
right and wrong are checked mechanically. A mode is compared with fp32 by whether it chooses the same tools and
arguments, by a sign test over everything that one gets right and the other does not, and, over a fixed text as
context, by its most likely token and the KL divergence at every position. Equal tokens are not asked for.
`--formats` names those that a GPU has and a CPU can show what they lose: see `bench.eval_formats`.
`--sabotage` must turn it red: `disturbed` lets layers of the judged modes trade places, `coarse` rounds bf16 weights to
four bits with no care, `altered` improves the evidence after the fact.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench import evidence
from bench.compiled import BenchError
from bench.eval_figures import REFERENCE, figures, is_green, misses, wilson
from bench.eval_run import FORMATS, Mode, Spoil, coarsen, compare, disturb
from bench.eval_tasks import QUESTIONS, TOOL_TASKS
from bench.evidence import Line
from engine.catalogue import models
from engine.modelfile import model_name
from runtime.cli import ensure_model
from runtime.settings import Settings

MODES = (REFERENCE, "bf16", "w4a8")
_POSITIONS = 384
SPOILERS: dict[str, Spoil] = {"disturbed": disturb, "coarse": coarsen}


def measure(
    model: Path,
    modes: Sequence[str] = MODES,
    *,
    threads: int = 2,
    tasks: int = len(TOOL_TASKS),
    questions: int = len(QUESTIONS),
    positions: int = _POSITIONS,
    spoil: Spoil | None = None,
) -> list[Line]:
    """Everything that every mode said, as lines of evidence. fp32 comes first: the others are compared with it."""
    assert modes[0] == REFERENCE
    lines: list[Line] = []
    reference = None
    for name in modes:
        try:
            mode = Mode(model, name, threads=threads, spoil=None if name == REFERENCE else spoil)
        except BenchError as error:
            lines.append({"kind": "absent", "mode": name, "why": str(error)})
            continue
        lines += [*mode.tool_calls(tasks), *mode.answers(questions)]
        found = mode.positions(positions)
        reference = found if reference is None else reference
        lines += compare(name, reference, found)
        click.echo(f"{model_name(model)} {name} done, load {evidence.load_average()}", err=True)
    return [{**line, "model": model_name(model)} for line in lines]


def _formats(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    named = tuple(value.split(",")) if value else ()
    unknown = [name for name in named if name not in FORMATS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none; there are {', '.join(FORMATS)}")
    return named


@click.command()
@click.option("--model", "names", multiple=True, help="A catalogue model; all of them where none is named.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--evidence", "directory", type=click.Path(path_type=Path), default=Path("bench/out"), show_default=True)
@click.option("--quick", is_flag=True, help="A few tasks and fp32 beside bf16 only.")
@click.option("--formats", callback=_formats, help=f"Beside fp32 these instead of the CPU's: of {', '.join(FORMATS)}.")
@click.option("--sabotage", type=click.Choice([*SPOILERS, "altered"]), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    names: tuple[str, ...], threads: int, directory: Path, quick: bool, formats: tuple[str, ...],
    sabotage: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Quantised modes beside fp32: tool calls, exact answers, every position of a text."""
    limits: dict[str, Any] = {"tasks": 6, "questions": 6, "positions": 48, "modes": MODES[:2]} if quick else {}
    if formats:
        limits["modes"] = (REFERENCE, *formats)
    if sabotage == "coarse":
        limits["modes"] = MODES[:2]
    lines: list[Line] = []
    for name in names or [entry.name for entry in models()]:
        settings = Settings.load(overrides={"TENUTO_MODEL": name})
        ensure_model(settings)
        lines += measure(settings.model_path, threads=threads, spoil=SPOILERS.get(sabotage or ""), **limits)
    path = directory / "eval.jsonl"
    evidence.leave(path, lines)
    if sabotage == "altered":
        evidence.alter(path, "position", "kl", 0.5)
    found, sealed = evidence.read(path)
    figure = figures(found, sealed)
    for text in misses(figure) if as_json else _report(found, figure):
        click.echo(text, err=as_json)
    if as_json:
        click.echo(json.dumps(figure))
    sys.exit(0 if is_green(figure) else 1)


def _report(lines: Sequence[Line], figure: dict[str, Any]) -> list[str]:
    heads = ["model/mode", "right tool", "right call", "right answer", "lost/won", "same tool", "same call", "top-1"]
    text = ["| " + " | ".join([*heads, "KL mean", "KL p99"]) + " |", "|---" * (len(heads) + 2) + "|"]
    for name, row in figure["modes"].items():
        cells = [_counted(row[key]) for key in ("tool", "call", "answer")]
        cells += [f"{row['lost']}/{row['won']} (p {row['worse_p']:.2f})"]
        cells += [f"{100 * row[key]:.0f}%" for key in ("same_tool", "same_call", "top1")]
        cells += [f"{row['kl_mean']:.4f}", f"{row['kl_p99']:.4f}"]
        text.append("| " + " | ".join([name, *cells]) + " |")
    text += ["", *(f"absent: {x['model']}/{x['mode']}: {x['why']}" for x in evidence.only(lines, "absent"))]
    return text + [f"MISSED: {miss}" for miss in misses(figure)]


def _counted(count: list[int]) -> str:
    low, high = wilson(count[0], count[1])
    return f"{count[0]}/{count[1]} ({100 * low:.0f}-{100 * high:.0f}%)"


if __name__ == "__main__":
    main()
