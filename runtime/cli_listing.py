"""What commands that list things share: a table for people, one JSON object per line for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click
import tenuto
from click.shell_completion import CompletionItem
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

PIPED_COLUMNS = 2000
_LEAST_PROSE = 32  # columns of the terminal for the last column of a table
_ANSWERS_WITHIN_S = 0.5  # whoever presses Tab waits for it
Row = Mapping[str, Any]


class SessionId(click.ParamType[str]):
    """A session's id, which a shell completes where a server answers quickly."""

    name = "session"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Ids of the newest sessions, with their states. Whatever goes wrong completes nothing."""
        try:
            with tenuto.Client(timeout_s=_ANSWERS_WITHIN_S, attempts=1) as client:
                rows = client.get("/v1/sessions", {"limit": 100})["data"]
        except tenuto.TenutoError:
            return []
        return [CompletionItem(row["id"], help=row["state"]) for row in rows if row["id"].startswith(incomplete)]


SESSION_ID = SessionId()
SESSION = click.argument("session", type=SESSION_ID)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")


def given(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for; None is left to the server."""
    return {name: value for name, value in asked.items() if value is not None}


def every(client: tenuto.Client, path: str, **params: Any) -> Iterator[dict[str, Any]]:
    """Everything of a list, page by page."""
    asked = given(params)
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
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*cells(row))
    draw(table)
    if not table.row_count:
        click.echo("(none)", err=True)


def draw(table: Table) -> None:
    """What its owner wrote is shown as it is; what is piped has a line for each row, however long."""
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[-1].overflow = "fold"
    Console(width=_width(table) if sys.stdout.isatty() else PIPED_COLUMNS, markup=False).print(table)


def _width(table: Table) -> int:
    """That of the terminal, or what it takes that no id is cut: only the last column gives way, being prose."""
    wide = Console(width=PIPED_COLUMNS, markup=False)
    last = table.columns[-1]
    prose = max(cell_len(line) for cell in (last.header, *last.cells) for line in str(cell).split("\n"))
    return max(Console().width, Measurement.get(wide, wide.options, table).maximum - max(0, prose - _LEAST_PROSE))


def segment(name: str) -> str:
    """An id or a name in an address, whatever is in it."""
    return quote(name, safe="@")


def moment(text: str | None) -> str:
    """A time as people read it, in UTC to the second."""
    return text[:19].replace("T", " ") if text else "never"


def told(answer: Mapping[str, Any], as_json: bool, sentence: str) -> None:
    click.echo(json.dumps(answer) if as_json else sentence)
