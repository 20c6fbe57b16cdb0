"""`tenuto agents`: what sessions are made of, under a name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import click
import tenuto

from runtime.cli_listing import every, moment, segment, show, told

FILE = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))


def read_body(path: Path) -> dict[str, Any]:
    """A JSON or TOML file, by its name. Raises click.UsageError."""
    try:
        text = path.read_text()
        body = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(body, dict):
        raise click.UsageError(f"{path} must hold one object")
    return body


@click.group()
def agents() -> None:
    """What sessions are made of, under a name, in versions that never change."""


@agents.command()
@FILE
@click.option("--name", help="Instead of the file's.")
@click.option("--json", "as_json", is_flag=True)
def create(file: Path, name: str | None, as_json: bool) -> None:
    """Make an agent of a JSON or TOML file: name, model, system, tools, limits and so on."""
    body = read_body(file) | ({"name": name} if name else {})
    with tenuto.Client() as client:
        made = client.post("/v1/agents", body)
    told(made, as_json, f"{made['id']}@{made['version']} is made")


@agents.command()
@click.argument("name")
@FILE
@click.option("--json", "as_json", is_flag=True)
def revise(name: str, file: Path, as_json: bool) -> None:
    """Make the next version of an agent, of a whole file; what equals the latest one is that one."""
    body = {key: value for key, value in read_body(file).items() if key != "name"}
    with tenuto.Client() as client:
        made = client.post(f"/v1/agents/{segment(name)}/versions", body)
    told(made, as_json, f"{name}@{made['id']}")


@agents.command("list")
@click.option("--archived", is_flag=True, help="Those that are archived as well.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per agent.")
def list_all(archived: bool, as_json: bool) -> None:
    """List agents, with their latest versions."""
    with tenuto.Client() as client:
        show(
            every(client, "/v1/agents", archived="true" if archived else None),
            as_json,
            ("name", "version", "model", "tools", "changed", "description"),
            lambda one: (
                one["id"] + (" (archived)" if one["archived_at"] else ""),
                str(one["version"]),
                one["model"] or "any",
                str(len(one["tools"])),
                moment(one["updated_at"]),
                one["description"][:60],
            ),
        )


@agents.command("show")
@click.argument("agent")
@click.option("--json", "as_json", is_flag=True, help="In one line.")
def show_one(agent: str, as_json: bool) -> None:
    """One agent (`name`, or `name@3`) as JSON."""
    name, _, number = agent.partition("@")
    if number and not number.isdecimal():
        raise click.UsageError(f"{agent!r} has no number behind the @; write such as {name}@1")
    path = f"/v1/agents/{segment(name)}" + (f"/versions/{number}" if number else "")
    with tenuto.Client() as client:
        click.echo(json.dumps(client.get(path), indent=None if as_json else 2))


@agents.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per version.")
def versions(name: str, as_json: bool) -> None:
    """List the versions of an agent, newest first."""
    with tenuto.Client() as client:
        show(
            every(client, f"/v1/agents/{segment(name)}/versions"),
            as_json,
            ("version", "made", "model", "description"),
            lambda one: (str(one["id"]), moment(one["created_at"]), one["model"] or "any", one["description"][:60]),
        )


@agents.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True)
def archive(name: str, as_json: bool) -> None:
    """Make no more sessions of an agent; those that there are go on."""
    with tenuto.Client() as client:
        told(client.post(f"/v1/agents/{segment(name)}/archive"), as_json, f"{name} is archived")
