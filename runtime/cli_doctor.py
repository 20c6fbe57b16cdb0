"""`tenuto doctor`: what is wrong, why, and what to do; where nothing answers, what this home knows of it."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import tenuto

from runtime import bundle as bundles
from runtime import deaths, doctor
from runtime.cli_listing import AS_JSON, given
from runtime.errors import TenutoError
from runtime.settings import Settings

WITHIN_S = 90.0
_COLOURS = {"critical": "red", "warning": "yellow", "advice": "cyan"}
_NODE = click.option("--node", help="Only this node; every one that is up by default.")


@click.group("doctor", invoke_without_command=True)
@_NODE
@AS_JSON
@click.pass_context
def doctor_group(ctx: click.Context, node: str | None, as_json: bool) -> None:
    """What is wrong with nodes and engines, why, and what to do: everything, or one part of it.

    Exit status 1 where something is critical or somebody waits for it (warning); advice alone is 0.
    """
    if ctx.invoked_subcommand is None:
        _examine(ctx, None, node, as_json)
    elif node is not None or as_json:
        raise click.UsageError(f"say --node and --json behind {ctx.invoked_subcommand}")


def _part(name: str, words: str) -> click.Command:
    @click.command(name, help=words)
    @_NODE
    @AS_JSON
    @click.pass_context
    def command(ctx: click.Context, node: str | None, as_json: bool) -> None:
        _examine(ctx, name, node, as_json)

    return command


for _name, _words in {
    "memory": "Where the memory went; why an engine did not start, or was killed; whether it can fit at all.",
    "pool": "A full KV pool with idle compute, and six remedies by what they cost this load.",
    "tail": "A flat median with a broken tail: six suspects, ruled out in order.",
    "precision": "Which quantisation for which bottleneck, and the evals to run after it.",
    "speculation": "The draft length that pays, from measured acceptance and batch.",
}.items():
    doctor_group.add_command(_part(_name, _words))


@doctor_group.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
@AS_JSON
def bundle(out: Path | None, as_json: bool) -> None:
    """Write what a support person needs into one tar.gz: no content of sessions, no token ids, no keys."""
    parts, logs, missing = _bundle()
    now = datetime.datetime.now(datetime.UTC)
    path = out or Path(f"tenuto-bundle-{now:%Y%m%dT%H%M%SZ}.tar.gz")
    data = bundles.packed(parts, logs, missing)
    _write(path, data)
    names = [name for name, _ in bundles.members(data)]
    if as_json:
        told = {"path": str(path), "bytes": len(data), "files": names, "missing": missing}
        click.echo(json.dumps(told))
        return
    click.echo(f"{path}: {len(names)} files, {len(data):,} bytes; look through it before you send it")
    for name, why in missing.items():
        click.echo(f"missing: {name}: {why}", err=True)


def _write(path: Path, data: bytes) -> None:
    """For us only. Raises TenutoError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    except OSError as error:
        raise TenutoError(f"{path} cannot be written: {error.strerror}") from error


def _bundle() -> tuple[Mapping[str, Any], Mapping[str, str], dict[str, str]]:
    """Parts, logs, and what is missing with why."""
    try:
        with tenuto.Client(timeout_s=WITHIN_S, attempts=2) as client:
            told = client.get("/v1/admin/doctor/bundle")
        return told["parts"], told["logs"], dict(told["missing"])
    except tenuto.APIError:
        raise
    except tenuto.TenutoError as error:
        settings = Settings.load()
        scrubber = bundles.Scrubber(bundles.secret_values(settings))
        parts = {
            "versions.json": bundles.versions(),
            "settings.json": bundles.shown(settings),
            "findings.json": _here(settings, None, None, str(error)),
            "deaths.json": [asdict(death) for death in deaths.everyone(settings.logs_dir)],
        }
        missing = {"everything of the API": str(error)}
        return scrubber.value(parts), bundles.logs(settings, scrubber), scrubber.value(missing)


def _examine(ctx: click.Context, part: str | None, node: str | None, as_json: bool) -> None:
    reports = _reports(part, node)
    for report in reports:
        if as_json:
            click.echo(json.dumps(report))
        else:
            for line in lines(report):
                click.echo(line)
    if not reports:
        click.echo("no node is up, and none of this home ended lately", err=True)
    bad = any(finding["severity"] != "advice" for report in reports for finding in report["findings"])
    ctx.exit(1 if bad or not reports else 0)


def _reports(part: str | None, node: str | None) -> Sequence[Mapping[str, Any]]:
    """Of the API; where it is away, of this home, if an engine of it ended. Raises tenuto.TenutoError."""
    try:
        with tenuto.Client(timeout_s=WITHIN_S, attempts=2) as client:
            data: list[dict[str, Any]] = client.get("/v1/admin/doctor", given({"part": part, "node": node}))["data"]
            return data
    except tenuto.APIError:
        raise
    except tenuto.TenutoError as error:
        here = _here(Settings.load(), part, node, str(error))
        if not here:
            raise
        return here


def _here(settings: Settings, part: str | None, node: str | None, why: str) -> list[dict[str, Any]]:
    """What this home knows by itself: of nodes whose engine ended other than by being stopped."""
    names = [name for name in doctor.seats_here(settings) if node in (None, name) and doctor.death_of(settings, name)]
    return [one for name in names for one in doctor.reports(doctor.of_silence(settings, name, why), part)]


def lines(report: Mapping[str, Any]) -> list[str]:
    """A report as people read it."""
    head = f"{report['node']}  {report['part']}"
    state = report["away"] or ("" if report["findings"] else "nothing is wrong")
    told = [f"{click.style(head, bold=True)}  {state}".rstrip()]
    for finding in report["findings"]:
        told += _finding(finding)
    return told + [f"  {note}" for note in report["notes"]]


def _finding(finding: Mapping[str, Any]) -> list[str]:
    name = click.style(f"{finding['severity']}: {finding['name']}", fg=_COLOURS[finding["severity"]])
    evidence = ", ".join(f"{key} {_value(key, value)}" for key, value in finding["evidence"].items())
    told = [f"  {name}", f"    {finding['cause']}", f"    evidence: {evidence}"]
    for number, remedy in enumerate(finding["remedies"], 1):
        told.append(f"    {number}. {remedy['set']}: {remedy['effect']} (costs: {remedy['cost']})")
    return told


def _value(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) and name.endswith(("_bytes", "_tokens")) else str(value)
