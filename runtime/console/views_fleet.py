"""What is there, and what needs a person: the fleet, sessions, the inbox, tiers, sandboxes, nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from runtime.console.actions import whole
from runtime.console.charts import Share, shares
from runtime.console.inside import Refused
from runtime.console.show import Page
from runtime.console.visit import Visit, lacks, needed, rows
from workflows.states import State

SOURCES: Final = ("device", "host", "nvme", "shared", "recomputed", "computed")
TIERS: Final = ("host", "nvme", "shared")
SESSIONS_SHOWN: Final = 25
ASKED_SHOWN: Final = 15
_FILTERS: Final = ("state", "tenant", "node", "model", "tier", "text", "older_than_s")


async def fleet(visit: Visit) -> Page:
    """Ten seconds: what is wrong, then how much there is."""
    overview, attention, nodes, kv, questions = await visit.api.many(
        "/overview", "/attention", "/nodes", "/kv", ("/approvals", {"limit": 5})
    )
    needed(overview)
    return Page(
        "fleet.html",
        {
            "overview": overview,
            "attention": None if isinstance(attention, Refused) else attention,
            "nodes": rows(nodes),
            "tiers": _tiers(rows(kv)),
            "kv": rows(kv),
            "questions": rows(questions),
            "tokens": shares([Share(name, overview["tokens_today"][name], name) for name in SOURCES]),
            "lacks": lacks(attention=attention, nodes=nodes, tiers=kv, approvals=questions),
        },
    )


def _tiers(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Used and budget of each tier of each node that said."""
    found = []
    for node in nodes:
        if node["error"] is not None:
            continue
        pool = node["device"]
        used = pool["total"] - pool["free"]
        found.append({"node": node["id"], "tier": "device", "used": used, "budget": pool["total"], "unit": "pages"})
        for tier in TIERS:
            facts = node["tiers"].get(tier)
            if facts and facts["budget_bytes"]:
                about = {"used": facts["used_bytes"], "budget": facts["budget_bytes"], "unit": "bytes"}
                found.append({"node": node["id"], "tier": tier, **about})
    return found


async def sessions(visit: Visit) -> Page:
    """Whoever's they are, by what an operator knows of them."""
    wanted: dict[str, Any] = {name: visit.query[name] for name in _FILTERS if name in visit.query}
    page, tenants, nodes, *many = await visit.api.many(
        ("/sessions", {**wanted, "limit": SESSIONS_SHOWN, "after": visit.query.get("after")}),
        ("/tenants", {"limit": 200}),
        "/nodes",
        *([("/sessions/count", wanted)] if wanted else []),  # of all of them nobody is asked to cancel any
    )
    return Page(
        "sessions.html",
        {
            "page": None if isinstance(page, Refused) else page,
            "wrong": page.message if isinstance(page, Refused) else None,
            "wanted": wanted,
            "states": [str(state) for state in State],
            "tenants": [tenant["id"] for tenant in rows(tenants)],
            "nodes": [node["id"] for node in rows(nodes)],
            "open": many[0]["open"] if many and not isinstance(many[0], Refused) else None,
            "filter": json.dumps(_as_filter(wanted)),
        },
    )


def _as_filter(wanted: Mapping[str, str]) -> dict[str, Any]:
    """As POST /v1/admin/sessions/cancel takes it."""
    found: dict[str, Any] = {name: text for name, text in wanted.items() if name not in ("state", "older_than_s")}
    if "state" in wanted:
        found["states"] = [wanted["state"]]
    if wanted.get("older_than_s", "").isdecimal() and len(wanted["older_than_s"]) < 12:
        found["older_than_s"] = whole(wanted["older_than_s"])
    return found


async def approvals(visit: Visit) -> Page:
    """What sessions wait for a person with."""
    kind = visit.query.get("kind")
    found = await visit.api.get("/approvals", kind=kind, limit=ASKED_SHOWN, after=visit.query.get("after"))
    return Page("approvals.html", {"page": found, "kind": kind})


async def kv(visit: Visit) -> Page:
    """Where pages are, whose, and whether it adds up."""
    nodes, *held = await visit.api.many("/kv", *(("/sessions", {"tier": tier, "limit": 5}) for tier in _PLACES))
    owners = {tier: rows(found) for tier, found in zip(_PLACES, held, strict=True)}
    return Page(
        "kv.html", {"nodes": rows(nodes), "tiers": _tiers(rows(nodes)), "owners": owners, "lacks": lacks(tiers=nodes)}
    )


_PLACES: Final = ("device", *TIERS)


async def sandboxes(visit: Visit) -> Page:
    """Sandboxes that sessions have, what nodes keep ready, and what was denied."""
    found, nodes, attention = await visit.api.many(
        ("/sandboxes", {"limit": 100, "after": visit.query.get("after")}), "/nodes", "/attention"
    )
    denied = [] if isinstance(attention, Refused) else attention["egress_denied"]
    return Page("sandboxes.html", {"page": needed(found), "nodes": rows(nodes), "denied": denied})


async def nodes(visit: Visit) -> Page:
    """Nodes, their engines, and what the doctor finds."""
    found, engines, reports = await visit.api.many("/nodes", "/engines", "/doctor")
    needed(found)
    findings: dict[str, list[dict[str, Any]]] = {}
    for report in rows(reports):
        findings.setdefault(report["node"], []).extend(report["findings"])
    by_name = {engine["id"]: engine for engine in rows(engines)}
    facts = {"nodes": rows(found), "engines": by_name, "findings": findings}
    return Page("nodes.html", {**facts, "lacks": lacks(engines=engines, findings=reports)})
