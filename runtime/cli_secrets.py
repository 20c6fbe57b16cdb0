"""`tenuto secrets`: values that tools use by name."""

from __future__ import annotations

import sys

import click
import tenuto

from runtime.cli_listing import every, moment, segment, show, told


@click.group()
def secrets() -> None:
    """Values that tools use by name. They are written, and never shown again."""


@secrets.command("set")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True)
def set_one(name: str, as_json: bool) -> None:
    """Make a secret or replace it: its value comes from standard input, or is asked for without echo."""
    if sys.stdin.isatty():
        value = click.prompt(f"value of {name}", hide_input=True, confirmation_prompt=True, err=True)
    else:
        value = sys.stdin.read().removesuffix("\n")
    if not value:
        raise click.UsageError("the value is empty; give it on standard input")
    with tenuto.Client() as client:
        told(client.put(f"/v1/secrets/{segment(name)}", {"value": value}), as_json, f"{name} is set")


@secrets.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per secret.")
def list_all(as_json: bool) -> None:
    """Names, and when each was set and used last."""
    with tenuto.Client() as client:
        show(
            every(client, "/v1/secrets"),
            as_json,
            ("name", "set", "last used"),
            lambda one: (one["id"], moment(one["updated_at"]), moment(one["last_used_at"])),
        )


@secrets.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True)
def delete(name: str, as_json: bool) -> None:
    """Remove a secret: calls that need it are refused from now on."""
    with tenuto.Client() as client:
        told(client.delete(f"/v1/secrets/{segment(name)}"), as_json, f"{name} is deleted")
