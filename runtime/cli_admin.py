"""`tenuto keys`, `tenants`, `usage`, `audit`: who may call, how much, and what it came to."""

from __future__ import annotations

import csv
import datetime
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
import tenuto

from runtime.cli_listing import AS_JSON, every, given, moment, segment, show

PAGE = 1000  # rows of one request
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Duration(click.ParamType[int]):
    """Seconds, from `90`, `30m`, `12h` or `7d`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d{1,9})([smhd]?)", str(value))
        if not found:
            self.fail("use a number of seconds, or such as 30m, 12h, 7d", param, ctx)
        return int(found[1]) * _UNITS_S[found[2] or "s"]


@click.group()
def keys() -> None:
    """API keys: make, list, rotate and revoke them."""


@keys.command("create")
@click.option("--tenant", default="default", show_default=True)
@click.option("--scope", type=click.Choice(["use", "admin"]), default="use", show_default=True)
@click.option("--name", default="", help="What it is for.")
@click.option("--expires-in", type=Duration(), help="How long it works, as 12h or 90d; for ever by default.")
@click.option("--requests-per-minute", type=click.IntRange(1, 1_000_000), help="Any number by default.")
@AS_JSON
def keys_create(
    tenant: str, scope: str, name: str, expires_in: int | None, requests_per_minute: int | None, as_json: bool
) -> None:
    """Make a key. It is shown this once."""
    body: dict[str, Any] = {"tenant": tenant, "scope": scope, "name": name, "requests_per_minute": requests_per_minute}
    if expires_in is not None:
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=expires_in)
        body["expires_at"] = until.isoformat()
    with tenuto.Client() as client:
        _show_once(client.post("/v1/admin/keys", body), as_json)


@keys.command("list")
@click.option("--tenant", help="Of one tenant.")
@AS_JSON
def keys_list(tenant: str | None, as_json: bool) -> None:
    """Newest first, those that do not work any more too."""
    with tenuto.Client() as client:
        rows = list(every(client, "/v1/admin/keys", tenant=tenant, limit=PAGE))
    columns = ("id", "prefix", "tenant", "scope", "name", "state", "requests_per_minute", "expires_at", "last_used_at")
    _tell(rows, columns, as_json)


@keys.command("rotate")
@click.argument("key_id")
@click.option("--grace", type=Duration(), default=0, show_default=True, help="How long the old one works on.")
@AS_JSON
def keys_rotate(key_id: str, grace: int, as_json: bool) -> None:
    """A new key in the place of an old one."""
    with tenuto.Client() as client:
        _show_once(client.post(f"/v1/admin/keys/{segment(key_id)}/rotate", {"grace_s": grace}), as_json)


@keys.command("revoke")
@click.argument("key_id")
@AS_JSON
def keys_revoke(key_id: str, as_json: bool) -> None:
    """The key works no more."""
    with tenuto.Client() as client:
        found = client.post(f"/v1/admin/keys/{segment(key_id)}/revoke")
    click.echo(json.dumps(found) if as_json else f"{key_id} is revoked")


def _show_once(made: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(made))
    elif made["key"] is None:
        click.echo(f"{made['id']} was made, but the answer with the key was lost: rotate it to get one", err=True)
    else:
        click.echo(f"{made['id']} of {made['tenant']}; the key is shown this once:", err=True)
        click.echo(made["key"])


@click.group()
def tenants() -> None:
    """Tenants: make, list, limit, disable and enable them."""


def _quota_options(command: Callable[..., None]) -> Callable[..., None]:
    for name, what in (
        ("sandboxes", "Sandboxes at once."),
        ("disk-bytes", "Bytes of the workspaces of open sessions, by their limits."),
        ("tokens-per-day", "Tokens sampled and prefilled in a day (UTC)."),
        ("open-sessions", "Sessions that are open at once."),
    ):
        command = click.option(f"--{name}", help=f"{what} A number, or none for any.")(command)
    return command


@tenants.command("create")
@click.argument("tenant_id")
@_quota_options
@AS_JSON
def tenants_create(tenant_id: str, as_json: bool, **quotas: str | None) -> None:
    """Make a tenant; then make a key of it."""
    with tenuto.Client() as client:
        made = client.post("/v1/admin/tenants", {"id": tenant_id, "quotas": _quotas(quotas)})
    click.echo(json.dumps(made) if as_json else f"{tenant_id} is there; `tenuto keys create --tenant {tenant_id}`")


@tenants.command("list")
@AS_JSON
def tenants_list(as_json: bool) -> None:
    """By name, with their quotas."""
    with tenuto.Client() as client:
        rows = list(every(client, "/v1/admin/tenants", limit=PAGE))
    if not as_json:
        rows = [{**row, **row["quotas"]} for row in rows]
    columns = ("id", "state", "open_sessions", "tokens_per_day", "disk_bytes", "sandboxes", "created_at")
    _tell(rows, columns, as_json)


@tenants.command("limit")
@click.argument("tenant_id")
@_quota_options
@AS_JSON
def tenants_limit(tenant_id: str, as_json: bool, **quotas: str | None) -> None:
    """Set quotas; those that are not named stay."""
    with tenuto.Client() as client:
        found = client.patch(f"/v1/admin/tenants/{segment(tenant_id)}", {"quotas": _quotas(quotas)})
    said = ", ".join(f"{name} {'any' if value is None else value}" for name, value in found["quotas"].items())
    click.echo(json.dumps(found) if as_json else f"{tenant_id}: {said}")


def _quotas(given: Mapping[str, str | None]) -> dict[str, int | None]:
    """Raises click.UsageError for what is no number."""
    found: dict[str, int | None] = {}
    for name, text in given.items():
        if text is None:
            continue
        if text != "none" and not text.isdecimal():
            raise click.UsageError(f"--{name.replace('_', '-')} is {text!r}; use a number, or none for any")
        found[name] = None if text == "none" else int(text)
    return found


@tenants.command("disable")
@click.argument("tenant_id")
@AS_JSON
def tenants_disable(tenant_id: str, as_json: bool) -> None:
    """Refuse its keys; its sessions stay open."""
    _switch(tenant_id, "disable", as_json)


@tenants.command("enable")
@click.argument("tenant_id")
@AS_JSON
def tenants_enable(tenant_id: str, as_json: bool) -> None:
    """Its keys work again."""
    _switch(tenant_id, "enable", as_json)


def _switch(tenant_id: str, verb: str, as_json: bool) -> None:
    with tenuto.Client() as client:
        found = client.post(f"/v1/admin/tenants/{segment(tenant_id)}/{verb}")
    click.echo(json.dumps(found) if as_json else f"{tenant_id} is {found['state']}")


@click.command()
@click.option("--group-by", type=click.Choice(["tenant", "session", "model", "day"]), default="day", show_default=True)
@click.option("--from", "since", help="A day or a time (UTC where it says no zone); thirty days ago by default.")
@click.option("--to", "until", help="A day or a time; now by default.")
@click.option("--all", "everybody", is_flag=True, help="Of every tenant; takes an admin key.")
@click.option("--csv", "as_csv", is_flag=True, help="Every figure, as CSV with a row of names.")
@AS_JSON
def usage(group_by: str, since: str | None, until: str | None, everybody: bool, as_csv: bool, as_json: bool) -> None:
    """What was used, and what it costs by the price file that the API was started with (TENUTO_PRICES)."""
    asked = {"group_by": group_by, "from": since, "to": until}
    with tenuto.Client() as client:
        rows = list(every(client, "/v1/admin/usage" if everybody else "/v1/usage", **asked, limit=PAGE))
    if as_csv:
        writer = csv.DictWriter(sys.stdout, [name for name in (rows[0] if rows else {"id": ""}) if name != "object"])
        writer.writeheader()
        writer.writerows({name: value for name, value in row.items() if name != "object"} for row in rows)
        return
    columns = (
        "id",
        "sessions",
        "steps",
        "sampled_tokens",
        "prefilled_tokens",
        "cached_tokens",
        "engine_s",
        "avoided_s",
    )
    _tell(rows, (*columns, "sandbox_s", "tool_s", "cost", "currency"), as_json)


@click.command()
@click.option("--key", help="By one key.")
@click.option("--action", help="Such as keys.revoke.")
@click.option("--target", help="On one thing.")
@click.option("--outcome", type=click.Choice(["done", "refused", "failed"]))
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
@AS_JSON
def audit(
    key: str | None, action: str | None, target: str | None, outcome: str | None, limit: int, as_json: bool
) -> None:
    """What operators changed, or tried to; newest first."""
    asked = {"key": key, "action": action, "target": target, "outcome": outcome, "limit": limit}
    with tenuto.Client() as client:
        rows = client.get("/v1/admin/audit", given(asked))["data"]
    _tell(rows, ("created_at", "key_id", "action", "target", "outcome", "request_id"), as_json)


def _tell(rows: Sequence[Mapping[str, Any]], columns: Iterable[str], as_json: bool) -> None:
    """For people a table, in which what is null or not known is a dash."""
    names = list(columns)
    titles = [name.replace("_", " ") for name in names]
    show(rows, as_json, titles, lambda row: [_cell(row[name]) for name in names])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\dT", value):
        return moment(value)
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
