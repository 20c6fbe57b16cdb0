"""The kernels' gate, with no GPU: what is launched must compile well for every target, and compute what it means.

    python -m bench.kernel_gate --worst

Every kernel's own launch functions are called with shapes of production and compiled for each target, and whole steps
of models as the backend launches them. Red is a spilled
register, more shared memory than the target has, a class of instructions that was wanted and is not there, a compiler
that fails, and a launch that is refused, unless `kernel_known` has a reason for it; so is a reason for nothing. With
`--worst` the samples also run, small, in Triton's interpreter beside their float64 meanings.

`--triton DIR` takes Triton from that directory. `--sabotage` breaks every launch and must turn the gate red: `spill`
gives it a single warp, `smem` stages 16 tiles ahead, `instruction` stages none, so that nothing is copied ahead.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench import evidence
from bench.evidence import Line
from bench.kernel_known import KNOWN, outdated, unexplained
from bench.kernel_table import compiled, findings, kernels, table
from bench.kernel_targets import TARGETS
from bench.verdict import show, tell

ROOT = Path(__file__).parent.parent
CACHE = Path(tempfile.gettempdir()) / f"tenuto-kernels-{os.getuid()}"
PROCESSES = 2


@dataclass(frozen=True)
class Wanted:
    """`triton`: the directory that Triton is taken from, or None for the one installed here."""

    targets: tuple[str, ...]
    kernels: tuple[str, ...] = ()
    worst: bool = False
    sabotage: str | None = None
    triton: Path | None = None
    cache: Path = CACHE


def measure(wanted: Wanted) -> list[Line]:
    """Compile, and run in the interpreter where that is wanted: the lines of the processes, each with its kind."""
    kernels = [part for name in wanted.kernels for part in ("--kernel", name)]
    broken = ["--sabotage", wanted.sabotage] if wanted.sabotage else []
    calls = [("compiled", ["bench.kernel_compile", target, *kernels, *broken]) for target in wanted.targets]
    if wanted.worst:
        calls.append(("worst", ["bench.kernel_worst", *kernels]))
    with ThreadPoolExecutor(PROCESSES) as pool:
        return [line for lines in pool.map(lambda call: list(_lines(wanted, *call)), calls) for line in lines]


def _lines(wanted: Wanted, kind: str, module: Sequence[str]) -> Iterator[Line]:
    path = os.pathsep.join(str(part) for part in (wanted.triton, ROOT) if part)
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(wanted.cache)}
    done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        raise click.ClickException(f"{' '.join(module)} ended with {done.returncode}: {done.stderr[-2000:]}")
    for text in done.stdout.splitlines():
        if text.startswith('{"kernel": '):
            yield {"kind": kind, **json.loads(text)}


def figures(lines: Sequence[Line], sealed: bool = True) -> dict[str, Any]:
    return {
        "kernels": len(kernels(lines)),
        "compiled": {target: compiled(evidence.only(lines, "compiled"), target) for target in _targets(lines)},
        "unexplained": len(misses(lines)) + (not sealed),
    }


def is_green(figure: dict[str, Any]) -> bool:
    return not figure["unexplained"]


def misses(lines: Sequence[Line]) -> list[str]:
    """What turns the gate red, in sentences."""
    built = evidence.only(lines, "compiled")
    found = [finding for line in built for finding in findings(line)]
    wrong = [str(finding) for finding in unexplained(found, KNOWN)]
    for version in {line["triton"] for line in built}:
        ours = [line for line in built if line["triton"] == version]
        tried = {(line["kernel"], line["target"]) for line in ours}
        short = ".".join(version.split(".")[:2])
        wrong += [
            f"kernel_known has a reason for what does not occur: {one}" for one in outdated(found, KNOWN, tried, short)
        ]
    wrong += [
        f"{line['kernel']} ({line['sample']}): an error of {line['worst']:.2e}, {line['bound']:.0e} is allowed"
        for line in evidence.only(lines, "worst")
        if not line["worst"] <= line["bound"]  # NaN is neither
    ]
    return wrong if built or wrong else ["no kernel was found"]


def _targets(lines: Iterable[Line]) -> list[str]:
    tried = {line.get("target") for line in lines}
    return [target for target in TARGETS if target in tried]


def worst_errors(lines: Sequence[Line]) -> dict[str, Line]:
    """By kernel, the sample that comes closest to its bound, or goes furthest beyond it."""
    ordered = sorted(evidence.only(lines, "worst"), key=_part_of_bound)
    return {line["kernel"]: line for line in ordered}


def _part_of_bound(line: Line) -> float:
    """NaN is the worst; a copy's bound is zero."""
    if math.isnan(line["worst"]):
        return math.inf
    return float(line["worst"] / line["bound"]) if line["bound"] else math.copysign(math.inf, line["worst"] - 1e-300)


def report(lines: Sequence[Line]) -> list[str]:
    wrong = misses(lines)
    text = table(evidence.only(lines, "compiled"), worst_errors(lines))
    tried = _targets(lines)
    reasons = [f"known: {one}: {one.reason}" for one in KNOWN if one.target in tried]
    versions = sorted({line["triton"] for line in lines})
    return [f"Triton {', '.join(versions)}", *text, *reasons, *wrong, json.dumps(figures(lines))]


@click.command()
@click.option("--target", "targets", type=click.Choice(list(TARGETS)), multiple=True, help="All, unless given.")
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given again.")
@click.option("--worst", is_flag=True, help="Also run the tiny samples in the interpreter.")
@click.option("--triton", type=click.Path(exists=True, path_type=Path), help="Take Triton from this directory.")
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, help="Where compiled kernels are kept.")
@click.option("--evidence", "directory", type=click.Path(path_type=Path), help="Leave the raw lines in this directory.")
@click.option("--sabotage", type=click.Choice(["spill", "smem", "instruction"]), help="Break a promise on purpose.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(
    targets: tuple[str, ...],
    kernels: tuple[str, ...],
    worst: bool,
    triton: Path | None,
    cache: Path,
    directory: Path | None,
    sabotage: str | None,
    as_json: bool,
) -> None:
    """Compile every kernel for every target."""
    wanted = Wanted(targets or tuple(TARGETS), kernels, worst, sabotage, triton, cache)
    lines = measure(wanted)
    if directory:
        evidence.leave(directory / "kernels.jsonl", lines)
    tell(f"{len(lines)} lines; compiled kernels are kept in {cache}")
    show(figures(lines), misses(lines), lambda: report(lines), as_json=as_json)


if __name__ == "__main__":
    main()
