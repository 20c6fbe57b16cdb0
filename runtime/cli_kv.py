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
from runtime.cli_listing import draw, segment
from runtime.engine_view import tier_rows
from runtime.kv_audit import KvAudit, audit
from runtime.kv_story import story
from runtime.settings import Settings
from runtime.store import Database

SHOWN = 20
AUDIT_S = 320.0  # every page is read


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
        page = client.get(f"/v1/sessions/{segment(session)}/kv/decisions", after)
        yield from page["data"]
        if not page["has_more"]:
            return
        after = {"after": page["last_id"]}


@kv.command("audit")
@click.option("--address", help="Ask this engine itself (socket path or host:port), past the API.")
@click.option("--node", help="Only this node; every one that is up by default.")
@click.option("--repair", is_flag=True, help="Delete orphans and half files.")
@click.option("--shared", is_flag=True, help="Repair the shared store too; only if no other installation uses it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per node.")
@click.pass_context
def audit_command(
    ctx: click.Context, address: str | None, node: str | None, repair: bool, shared: bool, as_json: bool
) -> None:
    """Read every page of every tier and compare with the record; lists every orphan. Exit status 1 if there are any."""
    if address is not None:
        found = [("", asyncio.run(_audit(Settings.load(), address, repair, shared)))]
    else:
        asked = {"repair": repair, "shared": shared, **({"node": node} if node else {})}
        with tenuto.Client(timeout_s=AUDIT_S) as client:
            found = [_as_audit(one) for one in client.post("/v1/admin/kv/audit", asked)["data"]]
    for name, one in found:
        if as_json:
            click.echo(json.dumps({"node": name, **dataclasses.asdict(one), "clean": one.clean}))
        else:
            Console().print(*([f"[bold]{name}[/bold]"] if len(found) > 1 else []), view(one, repair=repair))
    ctx.exit(0 if found and all(one.clean for _, one in found) else 1)


def _as_audit(told: dict[str, Any]) -> tuple[str, KvAudit]:
    if told["error"]:
        raise tenuto.TenutoError(f"the tiers of {told['id']} could not be looked through: {told['error']}")
    names = [each.name for each in dataclasses.fields(KvAudit)]
    return told["id"], KvAudit(**{name: told[name] for name in names})


async def _audit(settings: Settings, address: str, repair: bool, shared: bool) -> KvAudit:
    # Here, since Temporal's client comes with it: a quarter of what a command would take to start.
    from runtime.embedded.postgres import PostgresServer

    dsn = settings.postgres_dsn or PostgresServer(settings).dsn
    async with await EngineClient.connect(address) as client, Database(dsn, size=2, patience_s=5) as db:
        return await audit(db, client, repair=repair, shared=shared)


@kv.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per node.")
def tiers(as_json: bool) -> None:
    """Show every node's tiers: pages, budgets, hits, faults, and from which length on each pays."""
    with tenuto.Client() as client:
        found = client.get("/v1/admin/kv")["data"]
    if as_json:
        for one in found:
            click.echo(json.dumps(one))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("node", "tier", "pages", "used", "budget", "hits", "misses", "evicted", "break-even", "faults"):
        table.add_column(column, justify="left" if column in ("node", "tier", "faults") else "right")
    for one in found:
        if one["error"]:
            table.add_row(one["id"], f"does not answer: {one['error']}")
            continue
        for row in tier_rows(one):
            table.add_row(one["id"], *row)
    draw(table)


@kv.command()
@click.argument("session")
@click.option("--ttl", "ttl_s", type=float, help="Seconds after which the pin ends by itself.")
@click.option("--json", "as_json", is_flag=True)
def pin(session: str, ttl_s: float | None, as_json: bool) -> None:
    """Keep a session's pages on the device."""
    with tenuto.Client() as client:
        _tell(client.sessions.get(session).pin(ttl_s=ttl_s), as_json)


@kv.command()
@click.argument("session")
@click.option("--tier", type=click.Choice(["auto", "host", "nvme", "shared"]), default="auto", show_default=True)
@click.option("--wait", is_flag=True, help="Until the copy has ended.")
@click.option("--json", "as_json", is_flag=True)
def offload(session: str, tier: str, wait: bool, as_json: bool) -> None:
    """Copy a session's pages to a tier, or where the policy says."""
    with tenuto.Client() as client:
        _tell(client.sessions.get(session).offload(tier, wait=wait), as_json)


@kv.command()
@click.argument("session")
@click.option("--wait", is_flag=True, help="Until they are there.")
@click.option("--json", "as_json", is_flag=True)
def prefetch(session: str, wait: bool, as_json: bool) -> None:
    """Bring a session's pages back to the device."""
    with tenuto.Client() as client:
        _tell(client.sessions.get(session).prefetch(wait=wait), as_json)


@kv.command("release")
@click.argument("session")
@click.option("--json", "as_json", is_flag=True)
def release_pages(session: str, as_json: bool) -> None:
    """Stop keeping a session's pages on the device."""
    with tenuto.Client() as client:
        _tell(client.sessions.get(session).release_kv(), as_json)


def _tell(receipt: tenuto.Receipt, as_json: bool) -> None:
    if as_json:
        click.echo(receipt.model_dump_json())
        return
    about = f"{receipt.pages:,} pages, {receipt.bytes / 1e6:,.1f} MB" + (f", {receipt.tier}" if receipt.tier else "")
    click.echo(f"{receipt.status}: {about}" + (f"; {receipt.detail}" if receipt.detail else ""))


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
