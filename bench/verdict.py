"""How a bench ends: its figures told, and the exit status that they deserve."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

Figure = dict[str, Any]


def tell(text: str) -> None:
    """Beside the figures, to whoever watches."""
    click.echo(text, err=True)


def show(figure: Figure, missed: Sequence[str], report: Callable[[], Sequence[str]], *, as_json: bool) -> NoReturn:
    """Print the figures, as one JSON object or as `report` has them, and exit: 0 where nothing is `missed`, else 1."""
    if as_json:
        for miss in missed:
            tell(miss)
        click.echo(json.dumps(figure))
    else:
        for text in report():
            click.echo(text)
    sys.exit(1 if missed else 0)
