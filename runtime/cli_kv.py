"""`tenuto kv`: where sessions' KV lies and why, and whether everything about it adds up."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import click
import tenuto
from rich.console import Console, Group, RenderableType
from rich.table import Table

from engine import EngineClient
from runtime.embedded.postgres import PostgresServer
from runtime.kv_audit import KvAudit, audit
from runtime.kv_story import story
from runtime.settings import Settings
from runtime.store import Database

SHOWN = 20


@click.group()
def kv() -> None:
    """Where sessions' KV lies and why, and whether it all adds up."""


@kv.command()
@click.argument("session")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per decision.")
def explain(session: str, as_json: bool) -> None:
    """The decisions about a session's KV as a story: what was expected of each, and what it took."""
    with tenuto.Client() as client:
        rows = list(_decisions(client, session))
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    if not rows:
        click.echo(f"nothing has been decided about the KV of {session} yet")
    for line in story(rows):
        click.echo(line)


def _decisions(client: tenuto.Client, session: str) -> Any:
    after: dict[str, Any] = {}
    while True:
        page = client.get(f"/v1/sessions/{session}/kv/decisions", after)
        yield from page["data"]
        if not page["has_more"]:
            return
        after = {"after": page["last_id"]}


@kv.command("audit")
@click.option("--address", help="Socket path or host:port; default: the engine of the stack that runs here.")
@click.option("--repair", is_flag=True, help="Delete orphans and half files.")
@click.option("--shared", is_flag=True, help="Repair the shared store too; only if no other installation uses it.")
@click.option("--json", "as_json", is_flag=True)
@click.pass_context
def audit_command(ctx: click.Context, address: str | None, repair: bool, shared: bool, as_json: bool) -> None:
    """Read every page of every tier and compare with the record; lists every orphan. Exit status 1 if there are any."""
    settings = Settings.load()
    found = asyncio.run(_audit(settings, address, repair, shared))
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(found), "clean": found.clean}))
    else:
        Console().print(view(found, repair=repair))
    ctx.exit(0 if found.clean else 1)


async def _audit(settings: Settings, address: str | None, repair: bool, shared: bool) -> KvAudit:
    dsn = settings.postgres_dsn or PostgresServer(settings).dsn
    target = address or settings.engine_target
    async with await EngineClient.connect(target) as client, Database(dsn, size=2, patience_s=5) as db:
        return await audit(db, client, repair=repair, shared=shared)


def view(found: KvAudit, *, repair: bool = False) -> RenderableType:
    """The sets side by side, then what is wrong, named."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "pages", "orphans"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("named by open sessions", f"{found.named:,}", "")
    table.add_row("on the device", f"{found.on_device:,}", "")
    for tier, pages in found.in_tiers.items():
        table.add_row(tier, f"{pages:,}", f"{len(found.orphans.get(tier, ())):,}")
    table.add_row("named and in no tier", f"{found.absent:,}", "")
    lines = [f"{found.verified:,} pages were read and verified; the engine's books: {found.integrity}"]
    flaws = [*_flaws(found)]
    lines += flaws[:SHOWN]
    if len(flaws) > SHOWN:
        lines.append(f"... and {len(flaws) - SHOWN} more; --json lists them all")
    if found.deleted:
        lines.append(f"{found.deleted} orphans were deleted")
    if found.absent:
        lines.append("what is named and in no tier is computed again when it is needed, or has grown into another page")
    lines.append(_verdict(found, repair))
    return Group(table, "", *lines)


def _verdict(found: KvAudit, repair: bool) -> str:
    if found.clean:
        return "clean: every page that lies anywhere is named by an open session"
    if not repair:
        return "NOT clean; try --repair"
    if "shared" in found.orphans:
        return "NOT clean; orphans of the shared store go with --shared, if no other installation uses it"
    return "NOT clean: what is listed above could not be repaired; look again in a minute"


def _flaws(found: KvAudit) -> Any:
    for tier, keys in found.orphans.items():
        yield from (f"orphan in {tier}: {key}" for key in keys)
    yield from (f"the engine holds pages of {name}, which is no open session" for name in found.strangers)
    for one in found.findings:
        state = ", repaired" if one["repaired"] else ""
        yield f"{one['flaw']} in {one['tier']}: {one['name']} ({one['size_bytes']:,} bytes{state})"
