"""What commands that list things share: a table for people, one JSON object per line for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
import tenuto
from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]


def every(client: tenuto.Client, path: str, **params: Any) -> Iterator[dict[str, Any]]:
    """Everything of a list, page by page."""
    asked = {name: value for name, value in params.items() if value is not None}
    while True:
        page = client.get(path, asked)
        yield from page["data"]
        if not page["has_more"]:
            return
        asked["after"] = page["last_id"]


def show(rows: Iterable[Row], as_json: bool, columns: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> None:
    """`cells`: of one row, in the order of the columns."""
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*cells(row))
    Console().print(table)


def moment(text: str | None) -> str:
    """A time as people read it, in UTC to the second."""
    return text[:19].replace("T", " ") if text else "never"


def told(answer: Mapping[str, Any], as_json: bool, sentence: str) -> None:
    click.echo(json.dumps(answer) if as_json else sentence)
