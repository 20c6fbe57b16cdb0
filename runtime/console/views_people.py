"""Tenants and their keys, what was used, who did what, and what to do when an alert comes."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Final

from markdown_it import MarkdownIt
from markupsafe import Markup

from runtime.console.inside import Refused
from runtime.console.show import Page
from runtime.console.visit import Visit, lacks, needed, rows

RUNBOOKS: Final = Path(__file__).parent / "runbooks"
GROUPS: Final = ("tenant", "model", "day", "session")


async def tenants(visit: Visit) -> Page:
    """Who may use it, and with which keys."""
    found, keys = await visit.api.many(("/tenants", {"limit": 200}), ("/keys", {"limit": 200}))
    return Page("tenants.html", {"tenants": rows(needed(found)), "keys": rows(keys), "lacks": lacks(keys=keys)})


async def tenant(visit: Visit) -> Page:
    """One tenant: quotas, keys, webhooks and their deliveries, what it used today."""
    name = visit.path("tenant")
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=7)
    about, keys, webhooks, used = await visit.api.many(
        f"/tenants/{name}",
        ("/keys", {"tenant": name, "limit": 200}),
        f"/tenants/{name}/webhooks",
        (f"/tenants/{name}/usage", {"group_by": "day", "from": since.isoformat()}),
    )
    hooks = rows(webhooks)
    told = await visit.api.many(
        *((f"/tenants/{name}/webhooks/{one['id']}/deliveries", {"limit": 10}) for one in hooks[:20])
    )
    deliveries = {one["id"]: rows(found) for one, found in zip(hooks, told, strict=False)}
    facts = {"keys": rows(keys), "webhooks": hooks, "deliveries": deliveries, "usage": rows(used)}
    return Page(
        "tenant.html", {"tenant": needed(about), **facts, "lacks": lacks(keys=keys, webhooks=webhooks, usage=used)}
    )


async def usage(visit: Visit) -> Page:
    """What was used, by tenant, model, day or session; as money where there is a price file."""
    group = visit.query.get("group_by", "tenant")
    days = visit.query.get("days", "1")
    span = int(days) if days.isdigit() and 0 < int(days) <= 366 else 1
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=span)
    group = group if group in GROUPS else "tenant"
    found = await visit.api.get("/usage", group_by=group, limit=200, **{"from": since.isoformat()})
    return Page("usage.html", {"page": found, "group": group, "groups": GROUPS, "days": span})


async def audit(visit: Visit) -> Page:
    """Who changed what, and what was refused."""
    names = ("key", "action", "target", "outcome", "after")
    wanted: dict[str, Any] = {name: visit.query[name] for name in names if name in visit.query}
    found = (await visit.api.many(("/audit", {**wanted, "limit": 50})))[0]
    wrong = found.message if isinstance(found, Refused) else None
    return Page("audit.html", {"page": None if wrong else found, "wrong": wrong, "wanted": wanted})


async def runbooks(visit: Visit) -> Page:
    """A page for each alert."""
    return Page("runbooks.html", {"names": sorted(path.stem for path in RUNBOOKS.glob("*.md"))})


async def runbook(visit: Visit) -> Page:
    name = visit.path("name")
    if name not in {path.stem for path in RUNBOOKS.glob("*.md")}:
        raise Refused(404, "not_found", f"there is no runbook {name}")
    text = (RUNBOOKS / f"{name}.md").read_text()
    made = MarkdownIt("commonmark", {"html": False}).render(text)
    return Page("runbook.html", {"name": name, "text": Markup(made)})
