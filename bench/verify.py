"""Recompute the benches' figures from the evidence in a directory.

python -m bench.verify DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bench import (
    crowd,
    engine_figures,
    eval_figures,
    evidence,
    policy_figures,
    policy_replay,
    replay_figures,
    resume,
    wake_figures,
)

Verdict = tuple[dict[str, Any], bool]


def _resume(path: Path) -> Verdict:
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    figure = resume.figures(samples, json.loads(path.with_suffix(".left.json").read_text()))
    return figure, resume.is_green(figure)


def _engine(path: Path) -> Verdict:
    figure = engine_figures.figures(*evidence.read(path))
    return figure, engine_figures.is_green(figure)


def _eval(path: Path) -> Verdict:
    figure = eval_figures.figures(*evidence.read(path))
    return figure, eval_figures.is_green(figure)


def _crowd(path: Path) -> Verdict:
    figure = crowd.figures([json.loads(line) for line in path.read_text().splitlines()])
    return figure, crowd.is_green(figure)


def _policy(path: Path) -> Verdict:
    figure = policy_figures.figures([json.loads(line) for line in path.read_text().splitlines()])
    return figure, policy_figures.is_green(figure)


def _policy_check(path: Path) -> Verdict:
    figure = policy_replay.compared([json.loads(line) for line in path.read_text().splitlines()])
    return figure, policy_replay.is_close(figure)


def _wake(path: Path) -> Verdict:
    figure = wake_figures.figures(*evidence.read(path))
    return figure, wake_figures.is_green(figure)


def _replay(path: Path) -> Verdict:
    figure = replay_figures.figures(*evidence.read(path))
    return figure, replay_figures.is_green(figure)


BENCHES: dict[str, Callable[[Path], Verdict]] = {
    "resume.jsonl": _resume,
    "engine.jsonl": _engine,
    "eval.jsonl": _eval,
    "crowd.jsonl": _crowd,
    "policy.jsonl": _policy,
    "wake.jsonl": _wake,
    "replay.jsonl": _replay,
    "policy_check.jsonl": _policy_check,
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
