"""`tenuto files`, `exec`, `export`, `import`: the workspace of a session, and the session as a file."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import tenuto
from rich.console import Console
from rich.table import Table

from runtime.cli_listing import AS_JSON

STEP = click.option("--step", type=int, help="As it was at the checkpoint of this step.")


@click.group()
def files() -> None:
    """The files of a session's workspace."""


@files.command("ls")
@click.argument("session")
@click.argument("path", default="")
@STEP
@click.option("-r", "--recursive", is_flag=True, help="With all that is below.")
@AS_JSON
def list_files(session: str, path: str, step: int | None, recursive: bool, as_json: bool) -> None:
    """List a folder, the workspace itself by default."""
    with tenuto.Client() as client:
        found = list(client.sessions.get(session).files.list(path, step=step, recursive=recursive))
    if as_json:
        for one in found:
            click.echo(one.model_dump_json())
        return
    table = Table(box=None, pad_edge=False)
    for column in ("mode", "size", "path"):
        table.add_column(column, justify="right" if column == "size" else "left", no_wrap=True)
    for one in found:
        end = "/" if one.kind == "folder" else f" -> {one.target}" if one.kind == "link" else ""
        table.add_row(one.mode or "", "" if one.size is None else f"{one.size:,}", f"{one.path}{end}")
    Console(soft_wrap=True, markup=False).print(table)


@files.command()
@click.argument("session")
@click.argument("path")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="A file; standard output else.")
@STEP
def get(session: str, path: str, output: Path | None, step: int | None) -> None:
    """Read a file."""
    with tenuto.Client() as client:
        data = client.sessions.get(session).files.read(path, step=step)
    if output is None:
        sys.stdout.buffer.write(data)
    else:
        with _writing(output):
            output.write_bytes(data)


@files.command()
@click.argument("session")
@click.argument("path")
@click.argument("source", type=click.File("rb"), default="-")
@click.option("--mode", default="0644", show_default=True, help="Permissions in octal.")
@AS_JSON
def put(session: str, path: str, source: Any, mode: str, as_json: bool) -> None:
    """Put a file into the workspace: SOURCE, or standard input."""
    with tenuto.Client() as client:
        done = client.sessions.get(session).files.write(path, source.read(), mode=mode)
    _say(done, as_json)


@files.command()
@click.argument("session")
@click.argument("path")
@AS_JSON
def rm(session: str, path: str, as_json: bool) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    with tenuto.Client() as client:
        done = client.sessions.get(session).files.delete(path)
    _say(done, as_json)


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise tenuto.TenutoError(f"{file} cannot be written: {error.strerror}") from error


def _say(done: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(done))
    elif done["state"] == "accepted":
        click.echo(f"{done['id']} is accepted; it is done when its turn comes")
    else:
        click.echo(f"{done['path']}: step {done['step']}")


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("session")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--timeout", "timeout_s", type=float, default=60.0, show_default=True, help="Seconds, 600 at most.")
@click.option("--stdin", "reads", is_flag=True, help="Give it what comes on standard input.")
@AS_JSON
@click.pass_context
def execute(
    ctx: click.Context, session: str, command: tuple[str, ...], timeout_s: float, reads: bool, as_json: bool
) -> None:
    """Run a command in the session's sandbox: tenuto exec SESSION -- ls -l. Ends with its exit status."""
    try:
        stdin = sys.stdin.buffer.read().decode() if reads else ""
    except UnicodeDecodeError as error:
        raise click.UsageError("standard input is no text in UTF-8; `tenuto files put` takes any bytes") from error
    with tenuto.Client() as client:
        ran = client.sessions.get(session).exec(command, timeout_s=timeout_s, stdin=stdin)
    if as_json:
        click.echo(ran.model_dump_json())
    else:
        click.echo(ran.output, nl=False)
        if ran.reason != "exit":
            click.echo(f"tenuto: it did not end by itself: {ran.reason}", err=True)
    ctx.exit(ran.exit if ran.reason == "exit" and ran.exit is not None else 1)


@click.command()
@click.argument("session")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--all-snapshots", is_flag=True, help="The workspace of every checkpoint, not only the last.")
@AS_JSON
def export(session: str, file: Path, all_snapshots: bool, as_json: bool) -> None:
    """Write a session to a file: its record and its workspace, without secrets and without KV."""
    with tenuto.Client() as client, _writing(file):
        client.sessions.get(session).export(file, snapshots="all" if all_snapshots else "last")
    size = file.stat().st_size
    told = {"session": session, "file": str(file), "size_bytes": size}
    click.echo(json.dumps(told) if as_json else f"{session} is in {file}, {size / 1e6:,.1f} MB")


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@AS_JSON
def import_(file: Path, as_json: bool) -> None:
    """Make a session from a file that `tenuto export` wrote."""
    with tenuto.Client() as client:
        made = client.sessions.import_(file)
        info = made.info()
    if as_json:
        click.echo(json.dumps({"id": made.id, "state": info.state, "secrets": list(made.missing_secrets)}))
        return
    click.echo(f"{made.id} is {info.state}, with {info.tokens:,} tokens")
    for place in made.missing_secrets:
        click.echo(f"it does not have the value of {place}: what needs it will be refused")
