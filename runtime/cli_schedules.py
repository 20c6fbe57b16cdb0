"""`tenuto schedules`: sessions that begin by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import tenuto

from runtime.cli_agents import FILE, read_body
from runtime.cli_listing import AS_JSON, every, moment, segment, show, told


@click.group()
def schedules() -> None:
    """Sessions that begin by themselves, at times or at intervals."""


@schedules.command()
@FILE
@AS_JSON
def create(file: Path, as_json: bool) -> None:
    """Make a schedule of a JSON or TOML file: agent, message, cron or every_s, time_zone, overlap and so on."""
    with tenuto.Client() as client:
        made = client.post("/v1/schedules", read_body(file))
    told(made, as_json, f"{made['id']} is made: {made['agent']}, {_when(made)}")


@schedules.command()
@click.argument("schedule")
@FILE
@AS_JSON
def change(schedule: str, file: Path, as_json: bool) -> None:
    """Change what a file says of a schedule; what it does not say stays."""
    with tenuto.Client() as client:
        made = client.patch(f"/v1/schedules/{segment(schedule)}", read_body(file))
    told(made, as_json, f"{made['id']}: {made['agent']}, {_when(made)}")


@schedules.command("list")
@AS_JSON
def list_all(as_json: bool) -> None:
    """List them."""
    with tenuto.Client() as client:
        show(
            every(client, "/v1/schedules"),
            as_json,
            ("schedule", "agent", "when", "overlap", "state", "message"),
            lambda one: (
                one["id"],
                one["agent"],
                _when(one),
                one["overlap"],
                "paused" if one["paused"] else "on",
                one["message"][:50],
            ),
        )


@schedules.command("show")
@click.argument("schedule")
@AS_JSON
def show_one(schedule: str, as_json: bool) -> None:
    """When a schedule fires next."""
    with tenuto.Client() as client:
        found = client.get(f"/v1/schedules/{segment(schedule)}")
    times = ", ".join(moment(one) for one in found["next_runs"] or ()) or "not known"
    told(found, as_json, f"{found['agent']}, {_when(found)}; next: {times}")


@schedules.command()
@click.argument("schedule")
@AS_JSON
def pause(schedule: str, as_json: bool) -> None:
    """Let a schedule fire no more until it is unpaused."""
    with tenuto.Client() as client:
        told(client.post(f"/v1/schedules/{segment(schedule)}/pause"), as_json, f"{schedule} is paused")


@schedules.command()
@click.argument("schedule")
@AS_JSON
def unpause(schedule: str, as_json: bool) -> None:
    """Let a schedule fire again."""
    with tenuto.Client() as client:
        told(client.post(f"/v1/schedules/{segment(schedule)}/unpause"), as_json, f"{schedule} is on")


@schedules.command()
@click.argument("schedule")
@AS_JSON
def trigger(schedule: str, as_json: bool) -> None:
    """Begin one run now."""
    with tenuto.Client() as client:
        made = client.post(f"/v1/schedules/{segment(schedule)}/trigger")
    told(made, as_json, f"session {made['session_id']}")


@schedules.command()
@click.argument("schedule")
@AS_JSON
def runs(schedule: str, as_json: bool) -> None:
    """What a schedule began, newest first."""
    with tenuto.Client() as client:
        show(
            every(client, f"/v1/schedules/{segment(schedule)}/runs"),
            as_json,
            ("began", "session", "state"),
            lambda one: (
                moment(one["created_at"]),
                one["session_id"] or "none",
                one["error"] or one["state"] or "its record is gone",
            ),
        )


@schedules.command()
@click.argument("schedule")
@AS_JSON
def delete(schedule: str, as_json: bool) -> None:
    """Remove a schedule; sessions that it made stay."""
    with tenuto.Client() as client:
        told(client.delete(f"/v1/schedules/{segment(schedule)}"), as_json, f"{schedule} is deleted")


def _when(one: Mapping[str, Any]) -> str:
    if one["cron"] is None:
        return f"every {one['every_s']:g} s"
    return f"{one['cron']} ({one['time_zone']})"
