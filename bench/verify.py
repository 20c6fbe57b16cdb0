"""Recompute the benches' figures from the evidence in a directory.

python -m bench.verify DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import click

from bench import (
    api_figures,
    capacity_figures,
    console_figures,
    crowd,
    endurance,
    engine_figures,
    eval_figures,
    evidence,
    faults_figures,
    gpu_figures,
    kernel_gate,
    policy_figures,
    policy_replay,
    replay_figures,
    resume,
    sandbox_figures,
    speculate_figures,
    steps_figures,
    wake_figures,
)

Verdict = tuple[dict[str, Any], bool]


def _resume(path: Path) -> Verdict:
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    figure = resume.figures(samples, json.loads(path.with_suffix(".left.json").read_text()))
    return figure, resume.is_green(figure)


class Figures(Protocol):
    """The figures of a bench whose evidence is sealed."""

    def figures(self, lines: list[evidence.Line], sealed: bool) -> dict[str, Any]: ...

    def is_green(self, figure: dict[str, Any]) -> bool: ...


def _sealed(bench: Figures) -> Callable[[Path], Verdict]:
    def verdict(path: Path) -> Verdict:
        figure = bench.figures(*evidence.read(path))
        return figure, bench.is_green(figure)

    return verdict


def _plain(
    figures: Callable[[list[dict[str, Any]]], dict[str, Any]], is_green: Callable[[dict[str, Any]], bool]
) -> Callable[[Path], Verdict]:
    def verdict(path: Path) -> Verdict:
        figure = figures([json.loads(line) for line in path.read_text().splitlines()])
        return figure, is_green(figure)

    return verdict


BENCHES: dict[str, Callable[[Path], Verdict]] = {
    "api.jsonl": _sealed(api_figures),
    "capacity.jsonl": _sealed(capacity_figures),
    "console.jsonl": _sealed(console_figures),
    "resume.jsonl": _resume,
    "engine.jsonl": _sealed(engine_figures),
    "eval.jsonl": _sealed(eval_figures),
    "crowd.jsonl": _plain(crowd.figures, crowd.is_green),
    "policy.jsonl": _plain(policy_figures.figures, policy_figures.is_green),
    "wake.jsonl": _sealed(wake_figures),
    "replay.jsonl": _sealed(replay_figures),
    "faults.jsonl": _sealed(faults_figures),
    "sandbox.jsonl": _sealed(sandbox_figures),
    "steps.jsonl": _sealed(steps_figures),
    "speculate.jsonl": _sealed(speculate_figures),
    "endurance.jsonl": _sealed(endurance),
    "gpu.jsonl": _sealed(gpu_figures),
    "kernels.jsonl": _sealed(kernel_gate),
    "policy_check.jsonl": _plain(policy_replay.compared, policy_replay.is_close),
}


@click.command()
@click.argument("directory", type=click.Path(exists=True, path_type=Path))
def main(directory: Path) -> None:
    """Figures from raw samples, a line for each bench that left some; exit status 1 if any are not green."""
    verdicts = [check(directory / name) for name, check in BENCHES.items() if (directory / name).is_file()]
    if not verdicts:
        raise click.ClickException(f"{directory} holds none of {', '.join(BENCHES)}")
    for figure, _ in verdicts:
        click.echo(json.dumps(figure))
    sys.exit(0 if all(green for _, green in verdicts) else 1)


if __name__ == "__main__":
    main()
