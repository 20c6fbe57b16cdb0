"""Recompute a bench's figures from its evidence.

python -m bench.verify DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from bench import crowd, resume


@click.command()
@click.argument("directory", type=click.Path(exists=True, path_type=Path))
def main(directory: Path) -> None:
    """Figures from the raw samples of every bench that left some there; exit status 1 if one is not green."""
    green = True
    if (directory / "resume.jsonl").exists():
        figure = resume.figures(_lines(directory / "resume.jsonl"), _whole(directory / "resume.left.json"))
        click.echo(json.dumps(figure))
        green &= resume.is_green(figure)
    if (directory / "crowd.jsonl").exists():
        figure = crowd.figures(_lines(directory / "crowd.jsonl"))
        click.echo(json.dumps(figure))
        green &= crowd.is_green(figure)
    sys.exit(0 if green else 1)


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _whole(path: Path) -> Any:
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
