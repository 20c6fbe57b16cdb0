"""`tenuto nodes`, `node drain`, `reconcile`, `release`: what an operator does with an installation."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import click
import tenuto
from rich.table import Table

from runtime.cli_listing import draw, segment

_POLL_S = 0.2


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per node.")
def nodes(as_json: bool) -> None:
    """List nodes: what each does, when it was last heard of, and the sessions that it has."""
    with tenuto.Client() as client:
        found = client.get("/v1/admin/nodes")["data"]
    if as_json:
        for one in found:
            click.echo(json.dumps(one))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("node", "state", "model", "last heard of", "sessions", "running", "sandboxes"):
        table.add_column(column)
    for one in found:
        heard = f"{one['heartbeat_age_s']:.0f} s ago"
        counts = [str(one["sessions"]), str(one["running"]), _sandboxes(one["sandboxes"])]
        table.add_row(one["id"], one["state"], one["model"], heard, *counts)
    draw(table)


def _sandboxes(one: dict[str, Any]) -> str:
    """How many, how many more are ready, and how many sessions had to wait longer than the budget says."""
    text = f"{one['live']} {one.get('backend') or '?'}"
    pool = one.get("pool")
    if pool:
        late = f", {pool['late']} of {pool['claims']} claims late" if pool["late"] else ""
        text += f", {pool['ready']} ready{late}"
        if pool["failure"]:
            text += f", none starts: {pool['failure']}"
    return text


@click.group()
def node() -> None:
    """One node of the installation."""


@node.command()
@click.argument("node_id")
@click.option("--wait", is_flag=True, help="Until it is drained.")
@click.option("--within", "within_s", type=float, default=120.0, show_default=True, help="Seconds to wait at most.")
@click.option("--json", "as_json", is_flag=True)
def drain(node_id: str, wait: bool, within_s: float, as_json: bool) -> None:
    """Give a node no more sessions, and hand over those that it has. See `node undrain`."""
    with tenuto.Client() as client:
        found = client.post(f"/v1/admin/nodes/{segment(node_id)}/drain")
        deadline = time.monotonic() + within_s
        while wait and found["state"] == "draining" and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found = _node(client, node_id)
    if as_json:
        click.echo(json.dumps(found))
    elif found["state"] == "drained":
        click.echo(f"{node_id} is drained; `tenuto node undrain` has it take sessions again")
    else:
        click.echo(f"{node_id} is {found['state']}, {found['running']} of its {found['sessions']} sessions run")
    if wait and found["state"] != "drained":
        raise click.exceptions.Exit(1)


@node.command()
@click.argument("node_id")
@click.option("--json", "as_json", is_flag=True)
def undrain(node_id: str, as_json: bool) -> None:
    """Have a node that drains, or is drained, take sessions again: its process ends, and is started anew."""
    with tenuto.Client() as client:
        found = client.post(f"/v1/admin/nodes/{segment(node_id)}/undrain")
    click.echo(json.dumps(found) if as_json else f"{node_id} starts anew, and takes sessions then")


def _node(client: tenuto.Client, node_id: str) -> dict[str, Any]:
    return next(one for one in client.get("/v1/admin/nodes")["data"] if one["id"] == node_id)


@click.command()
@click.option("--json", "as_json", is_flag=True)
def reconcile(as_json: bool) -> None:
    """Start every open session again that Temporal does not know of, from the record in Postgres."""
    with tenuto.Client() as client:
        found = client.post("/v1/admin/reconcile")
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(
        f"{found['open']} sessions are open: {found['restarted']} were started again, {found['running']} were running,"
        f" {found['not_begun']} have had no message yet, {found['failed']} could not be reached"
    )


@click.command()
@click.option("--json", "as_json", is_flag=True)
def release(as_json: bool) -> None:
    """Make the workflow code that is installed here the current one, once a worker of it runs.

    Under a running `tenuto up`, its Temporal is found by itself.
    """
    from runtime.home import read_state
    from runtime.process import connect_temporal
    from runtime.release import build_id
    from runtime.release import release as bring
    from runtime.settings import Settings

    settings = Settings.load()
    if settings.temporal_address is None and (address := read_state(settings.state_path).get("temporal")):
        settings = Settings.load(overrides={"TENUTO_TEMPORAL_ADDRESS": address})

    async def work() -> None:
        done = await bring(await connect_temporal(settings, patience_s=5.0), build_id())
        if as_json:
            counts = {"current": done.current, "told": done.told, "restarted": done.restarted}
            click.echo(json.dumps({"release": build_id(), **counts}))
            return
        click.echo(
            f"{build_id()} is current: {done.current} open sessions run it, {done.told} come to it at their next step,"
            f" {done.restarted} were begun again with it"
        )

    asyncio.run(work())
