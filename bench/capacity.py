"""What `tenuto plan` says, beside what this machine does.

    python -m bench.capacity --json

Bytes of pages are compared exactly, for each number that the cpu backend keeps KV in. For times the plan is given two
speeds of this machine, as whoever plans would measure them: that of a short prompt, and that of one decode step behind
it. From them it predicts a longer prompt, a step far into a context, and one of a batch. Then it
derives the two knobs for a time per token; an engine with that pool is given as many sessions as planned, which must
meet it, and three times as many, which must not.

`--sabotage` must turn a figure red: `heads` counts query heads for KV heads, `band` runs each step eight times, `knobs`
plans with a pool for a few sessions and gives it three times as many, `altered` improves the evidence after the fact.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil

from bench import evidence
from bench.capacity_figures import figures, misses, report
from bench.capacity_load import Load, run
from bench.columns import Column, Course, sizes
from bench.compiled import BenchError
from bench.evidence import Line
from bench.quiet import Watch
from bench.runners import Runner, open_runner, opened_backend
from bench.verdict import show
from engine.capacity import (
    Device,
    KvHeads,
    ModelFacts,
    Planned,
    Wish,
    attention_group,
    make_plan,
    measured_cpu,
    model_facts,
    page_bytes,
    prefill_flops,
)
from engine.modelfile import model_name
from runtime.cli import ensure_model
from runtime.settings import Settings

SABOTAGES = ("heads", "band", "knobs", "altered")
_SHORT = Column("short", 512)
_STEP = Column("step", 128, steps=12)
_COLUMNS = {
    "prefill": Column("prefill", 2048),
    "decode": Column("decode", 2048, steps=12),
    "batch": Column("batch", 128, steps=8, sequences=8),
}
_QUICK = {
    "prefill": Column("prefill", 1024),
    "decode": Column("decode", 512, steps=6),
    "batch": Column("batch", 128, steps=4, sequences=8),
}
_SLOWED = 8
_PATIENCE_S = 60.0  # spent on waiting for other programs to leave the machine alone
_CONTEXT, _PROMPT, _OUTPUT = 256, 208, 40
_ABOVE = 3
_FEW, _SESSIONS = 4, 8  # whose speed is measured; that the time for a token is chosen for


@dataclass(frozen=True)
class Wanted:
    """One run of the bench."""

    model: Path
    rounds: int = 5
    threads: int = 2
    quick: bool = False
    sabotage: str | None = None

    @property
    def columns(self) -> dict[str, Column]:
        return _QUICK if self.quick else _COLUMNS


async def measure(wanted: Wanted) -> list[Line]:
    """Raises BenchError where the cpu backend cannot be had here."""
    facts = model_facts(str(wanted.model), wanted.model.parent, io.BytesIO())
    lines = pages(wanted, facts)
    lines += _timed(wanted, facts)
    return [*lines, *await _loaded(wanted, facts)]


def pages(wanted: Wanted, facts: ModelFacts, dtypes: Sequence[str] = ("bf16", "fp32")) -> list[Line]:
    """Bytes of a page as the backend has it in memory."""
    lines: list[Line] = []
    for dtype in dtypes:
        _, backend = opened_backend(wanted.model, dtype, 4, wanted.threads)
        groups = [_swapped(facts)] if wanted.sabotage == "heads" else facts.groups
        allocated = len(backend.snapshot(0, 16))
        lines.append(
            {
                "kind": "page",
                "dtype": dtype,
                "predicted_bytes": page_bytes(groups, dtype),
                "allocated_bytes": allocated,
            }
        )
    return lines


def _swapped(facts: ModelFacts) -> Any:
    """The classic mistake, which takes a cast to make."""
    size = facts.groups[0].row_numbers // facts.groups[0].shards // 2
    one = attention_group(facts.query_heads, KvHeads(facts.query_heads.count), size, size)
    return replace(one, layers=facts.layers)


def _timed(wanted: Wanted, facts: ModelFacts) -> list[Line]:
    """Every column in turns with the two speeds that a plan is given: of each the best, for other programs only add."""
    columns = (_SHORT, _STEP, *wanted.columns.values())
    course = Course(_runner(wanted, columns, 1), columns)
    other = Course(_runner(wanted, columns, _SLOWED), columns) if wanted.sabotage == "band" else course
    given: list[tuple[float, float]] = []
    timings: list[tuple[str, float]] = []
    watch, foreign, patience_s = Watch([]), [], _PATIENCE_S
    for _ in range(wanted.rounds):
        patience_s -= watch.wait(patience_s)
        short_s, steps_s = (course.measure(one.name).seconds for one in (_SHORT, _STEP))
        given.append((short_s, steps_s / _STEP.steps))
        for name, column in wanted.columns.items():
            timings.append((name, other.measure(column.name).seconds / max(1, column.steps)))
        foreign.append(watch.cores())
    device = _device(facts, min(short_s for short_s, _ in given), min(step_s for _, step_s in given))
    predicted = {name: _predicted_s(facts, device, column) for name, column in wanted.columns.items()}
    about = {
        "model": model_name(wanted.model),
        "threads": wanted.threads,
        "foreign_cores": foreign,
        "load": evidence.load_average(),
    }
    return [
        {"kind": "machine", **about, "bps": device.hbm_bps, "flops": device.bf16_flops},
        *({"kind": "given", "short_s": short_s, "step_s": step_s} for short_s, step_s in given),
        *({"kind": "timing", "column": name, "seconds": one, "predicted_s": predicted[name]} for name, one in timings),
    ]


def _runner(wanted: Wanted, columns: Sequence[Column], slowed: int) -> Runner:
    return open_runner("ours/bf16", wanted.model, None, sizes(columns, wanted.threads), {"slowed": slowed})


def _device(facts: ModelFacts, short_s: float, step_s: float) -> Device:
    """This machine, by what a short prompt and a step of one sequence took."""
    flops = prefill_flops(facts, _SHORT.context) / short_s
    read = _plan(facts, _unit(flops), context=_STEP.context).placement.step_bytes(1)
    return measured_cpu(psutil.virtual_memory().total, read / step_s, flops, read / step_s)


def _unit(flops: float) -> Device:
    """Whose bytes can be counted before its bandwidth is known."""
    return measured_cpu(psutil.virtual_memory().total, 1e9, flops, 1e9)


def _plan(facts: ModelFacts, device: Device, **wish: Any) -> Planned:
    """As it is run: weights in bf16; what was measured is what is reached."""
    return make_plan(facts, Wish("cpu", weights_dtype="bf16", kv_dtype="bf16", mfu=1.0, mbu=1.0, **wish), device)


def _predicted_s(facts: ModelFacts, device: Device, column: Column) -> float:
    place = _plan(facts, device, context=column.context).placement
    return place.step_s(column.sequences) if column.steps else place.prefill_s(column.context)


async def _loaded(wanted: Wanted, facts: ModelFacts) -> list[Line]:
    """The knobs that follow from a time for a token, and what sessions get with them. What the engine computes in a
    batch, its scheduler and its wire among it, is measured with half as many sessions."""
    pool = _SESSIONS * _CONTEXT
    few = Load("few", _FEW, _PROMPT, _OUTPUT, 1.0)
    [before] = await run(wanted.model, pool, wanted.threads, [few], 1)
    flops = _plan(facts, _unit(1e9), context=_CONTEXT).placement.step_flops(_FEW) / median(before["seconds_per_token"])
    read = _plan(facts, _unit(flops), context=_CONTEXT).placement.step_bytes(_FEW)
    device = replace(_unit(flops), hbm_bps=read / median(before["seconds_per_token"]))
    slo_s = _plan(facts, device, context=_CONTEXT).placement.step_s(_SESSIONS)
    knobs = _plan(facts, device, context=_CONTEXT, slo_tpot_s=slo_s).plan.knobs
    assert knobs is not None
    many = knobs.max_sequences * _ABOVE
    loads = [
        Load("planned", many if wanted.sabotage == "knobs" else knobs.max_sequences, _PROMPT, _OUTPUT, slo_s),
        Load("above", many, _PROMPT, _OUTPUT, slo_s),
    ]
    found = await run(wanted.model, knobs.kv_pool_tokens, wanted.threads, loads, 1 if wanted.quick else 3)
    about = {"kind": "knobs", "max_sequences": knobs.max_sequences, "kv_pool_tokens": knobs.kv_pool_tokens}
    return [before, {**about, "memory_fraction": knobs.memory_fraction, "slo_s": slo_s}, *found]


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--quick", is_flag=True, help="Shorter prompts, to see in seconds that everything hangs together.")
@click.option("--evidence", "directory", type=click.Path(path_type=Path), default=Path("bench/out"), show_default=True)
@click.option("--sabotage", type=click.Choice(SABOTAGES), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(directory: Path, as_json: bool, model: str, **options: Any) -> None:
    """A plan of this machine beside what it does."""
    settings = Settings.load(overrides={"TENUTO_MODEL": model})
    ensure_model(settings)
    path = directory / "capacity.jsonl"
    try:
        evidence.leave(path, asyncio.run(measure(Wanted(settings.model_path, **options))))
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    if options["sabotage"] == "altered":
        evidence.alter(path, "timing", "seconds", 0.9)
    lines, sealed = evidence.read(path)
    figure = figures(lines, sealed)
    show(figure, misses(figure), lambda: report(lines, figure), as_json=as_json)


if __name__ == "__main__":
    main()
