"""Recompute a bench's figures from its evidence.

python -m bench.verify DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from bench import resume


@click.command()
@click.argument("directory", type=click.Path(exists=True, path_type=Path))
def main(directory: Path) -> None:
    """Figures from raw samples; exit status 1 if they are not green."""
    samples = [json.loads(line) for line in (directory / "resume.jsonl").read_text().splitlines()]
    figure = resume.figures(samples, json.loads((directory / "resume.left.json").read_text()))
    click.echo(json.dumps(figure))
    sys.exit(0 if resume.is_green(figure) else 1)


if __name__ == "__main__":
    main()
