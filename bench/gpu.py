"""Everything about the GPU path that only a GPU can say, in under eight minutes: for one H100 or H200.

    python -m bench.gpu --evidence DIR

How fast the device copies; every kernel's samples beside their float64 meanings; whether a token's bits depend on its
own context alone; kernels that only move bytes, at sizes where that shows, as a fraction of that copy; decode steps
launched kernel by kernel and replayed as a graph, with the host's microseconds; a whole model's logits beside the CPU
backend's; pages that come back from pinned memory and from NVMe beside computing them again, from 2,048 to 32,768
tokens; a session whose engine is killed. What does not fit into the budget is left out and said. Bars are in
`bench.gpu_figures`.

`--dry` runs all of it with no GPU: small, in Triton's interpreter, and with the compile gate's counts in its last line.
`--sabotage wrong-kernel` spoils a number in what each kernel writes, `alter` the evidence: both must turn the run red.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench import evidence, kernel_gate
from bench.evidence import Line
from bench.gpu_course import Course
from bench.gpu_figures import figures, misses, report
from bench.kernel_targets import TARGETS
from bench.verdict import show, tell
from engine.errors import BackendUnavailable

BUDGET_S = 450.0
_MODULES = {"decode": "steps", "logits": "steps"}  # bench.gpu_NAME of a part whose module has another name
PARTS = ("kernels", "bits", "bandwidth", "decode", "logits", "session", "restore")
# Seconds that a part wants before it is begun, on a GPU.
_WANTED_S = {
    "kernels": 30.0,
    "bits": 20.0,
    "bandwidth": 30.0,
    "decode": 60.0,
    "logits": 30.0,
    "session": 60.0,
    "restore": 60.0,
}


def measure(course: Course, parts: Sequence[str]) -> list[Line]:
    """Every line of a run. Triton is imported here: a dry run has it interpreted."""
    from bench import gpu_kernels

    gpu_kernels.about(course)
    course.part("copies", 0.0, lambda: gpu_kernels.copies(course))
    for part in parts:
        tell(f"{part}, {course.left_s:.0f} s left")
        course.part(part, 0.0 if course.dry else _WANTED_S[part], lambda part=part: _begin(part, course))  # type: ignore[misc]
        _tidy(course)
    return course.lines


def _begin(part: str, course: Course) -> None:
    """A part is imported where it begins: where one of its libraries is missing it fails alone."""
    module = importlib.import_module(f"bench.gpu_{_MODULES.get(part, part)}")
    getattr(module, part)(course)


def _tidy(course: Course) -> None:
    """Give back what a part held on the device."""
    import gc

    import torch

    gc.collect()
    if not course.dry:
        torch.cuda.empty_cache()


def _check_device() -> None:
    """Raises ClickException with what is missing, before anything is allocated."""
    try:
        from engine.backends.gpu_device import open_device

        open_device()
    except (BackendUnavailable, ImportError) as error:
        raise click.ClickException(f"{error}; --dry runs without a GPU") from error


@click.command()
@click.option("--budget", "budget_s", type=float, default=BUDGET_S, show_default=True, help="Seconds in all.")
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given again.")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Only this part; may be given again.")
@click.option("--target", "targets", type=click.Choice(list(TARGETS)), multiple=True, help="Of the dry run's gate.")
@click.option("--dry", is_flag=True, help="No GPU: small, interpreted, with the compile gate.")
@click.option(
    "--evidence",
    "directory",
    type=click.Path(path_type=Path),
    envvar="OUT",
    help="Leave the raw lines in this directory; $OUT unless given.",
)
@click.option("--sabotage", type=click.Choice(["wrong-kernel", "alter"]), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    budget_s: float,
    kernels: tuple[str, ...],
    parts: tuple[str, ...],
    targets: tuple[str, ...],
    dry: bool,
    directory: Path | None,
    sabotage: str | None,
    as_json: bool,
) -> None:
    """The GPU path on a GPU, or dry."""
    os.environ["TRITON_INTERPRET"] = "1" if dry else "0"  # before anything imports Triton
    if not dry:
        _check_device()
    with tempfile.TemporaryDirectory() as spare:
        path = (directory or Path(spare)) / "gpu.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        course = Course(dry, budget_s, kernels, sabotage, lambda line: _keep(path.with_suffix(".part"), line))
        lines = measure(course, parts or PARTS)
        built = kernel_gate.measure(kernel_gate.Wanted(targets or tuple(TARGETS), kernels)) if dry else []
        evidence.leave(path, lines)
        path.with_suffix(".part").unlink()
        if built:
            evidence.leave(path.with_name("kernels.jsonl"), built)
        if sabotage == "alter":
            evidence.alter(path, "check", "worst", 0.5)
        lines, sealed = evidence.read(path)
    _end(lines, sealed, built, parts, as_json=as_json)


def _keep(path: Path, line: Line) -> None:
    """At once, unsealed: a run may be cut off."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _end(lines: list[Line], sealed: bool, built: list[Line], parts: Sequence[str], *, as_json: bool) -> None:
    missed = misses(lines, sealed)
    if parts:  # what was not asked for is not missed
        missed = [miss for miss in missed if not miss.startswith("the run left no")]
    gate = kernel_gate.figures(built) if built else {}
    missed += kernel_gate.misses(built) if built else []
    figure: dict[str, Any] = {**gate, "unexplained": len(missed)} if built else figures(lines, sealed)
    text = [*report(lines), *(kernel_gate.report(built)[:-1] if built else []), *(f"MISSED: {miss}" for miss in missed)]
    show(figure, missed, lambda: [*text, json.dumps(figure)], as_json=as_json)


if __name__ == "__main__":
    main()
