"""`/v1/admin/engines`, `…/kv`, `…/sandboxes`: what nodes hold, and whether it adds up. A node is asked as in `asking`;
one that does not answer is named beside those that do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict, Field

from runtime.api.asking import carried_out
from runtime.api.documented import Limit, Page, Shape, page_of, refusals
from runtime.api.guard import Db, Tenant, admin
from runtime.config import Body
from runtime.errors import NotFound, Unavailable
from runtime.store import Database, errands, fleet, sandboxes
from runtime.store.sessions import new_id

router = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Depends(admin)], responses=refusals(404))

ASK_S = 10.0
AUDIT_S = 300.0
NodeName = Annotated[
    str | None, Query(min_length=1, max_length=200, description="Only this node; every living one by default.")
]


class EngineOut(Shape):
    """An engine: `card`, what it serves; `stats`, what it measures. `error`: why it did not answer."""

    id: str = Field(description="The node's name.")
    object: Literal["engine"] = "engine"
    card: dict[str, Any] | None = None
    stats: dict[str, Any] | None = None
    error: str | None = None


class KvOut(Shape):
    """The tiers of a node. Pages by tier, with budgets, hits, faults and quarantine; what is pinned; from which length
    on each tier pays (null: never); pages that were fetched and taken away unused."""

    id: str = Field(description="The node's name.")
    object: Literal["kv"] = "kv"
    tiers: dict[str, Any] = Field(default_factory=dict)
    device: dict[str, Any] = Field(default_factory=dict)
    pinned_pages: int = 0
    quarantined: int = 0
    break_even: dict[str, Any] = Field(default_factory=dict)
    prefetched: int = 0
    prefetched_unused: int = 0
    recomputed_tokens: int = 0
    integrity: str = Field(default="", description="`ok`, or what does not add up.")
    error: str | None = None


class AuditIn(Body):
    """The body of POST …/kv/audit. `repair`: delete orphans and half files; `shared`: also in the shared store, which
    is right only if no other installation uses it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"repair": False, "shared": False}]})

    repair: bool = False
    shared: bool = False
    node: str | None = Field(default=None, min_length=1, max_length=200)


class AuditOut(Shape):
    """What lies in the tiers of a node, compared with the record, every page read."""

    id: str = Field(description="The node's name.")
    object: Literal["kv.audit"] = "kv.audit"
    clean: bool
    named: int = 0
    in_tiers: dict[str, int] = Field(default_factory=dict)
    on_device: int = 0
    verified: int = 0
    orphans: dict[str, list[str]] = Field(default_factory=dict)
    strangers: list[str] = Field(default_factory=list)
    absent: int = 0
    integrity: str = ""
    findings: list[dict[str, Any]] = Field(default_factory=list)
    deleted: int = 0
    error: str | None = None


class SandboxOut(Shape):
    """A sandbox that a session has."""

    id: str
    object: Literal["sandbox"] = "sandbox"
    session_id: str
    session_state: str
    tenant: str
    node: str
    backend: str
    state: Literal["creating", "live"]
    created_at: str


@router.get("/engines")
async def list_engines(request: Request, db: Db, tenant: Tenant, node: NodeName = None) -> Page[EngineOut]:
    """The engine of every living node: its card and its figures."""
    found = await of_nodes(request, db, tenant, "engine", {}, node, ASK_S)
    return page_of([EngineOut(id=name, **_only(told, "card", "stats", "error")) for name, told in found], False)


@router.get("/kv")
async def list_tiers(request: Request, db: Db, tenant: Tenant, node: NodeName = None) -> Page[KvOut]:
    """Where KV lies on every living node: tiers, budgets, occupancy, pins, hits, faults, break-even."""
    found = await of_nodes(request, db, tenant, "engine", {}, node, ASK_S)
    return page_of([_tiers(name, told) for name, told in found], False)


@router.post("/kv/audit")
async def audit_kv(body: AuditIn, request: Request, db: Db, tenant: Tenant) -> Page[AuditOut]:
    """Read every page of every tier and compare with the record. Repeated: looked through anew."""
    asked = {"repair": body.repair, "shared": body.shared}
    found = await of_nodes(request, db, tenant, "audit", asked, body.node, AUDIT_S)
    names = [name for name in AuditOut.model_fields if name not in ("id", "object", "clean")]
    return page_of(
        [AuditOut(id=name, clean=bool(told.get("clean")), **_only(told, *names)) for name, told in found], False
    )


@router.get("/sandboxes")
async def list_sandboxes(
    db: Db,
    node: NodeName = None,
    limit: Limit = 100,
    after: Annotated[
        str | None, Query(min_length=1, max_length=300, description="The `last_id` of the page before.")
    ] = None,
) -> Page[SandboxOut]:
    """Sandboxes that sessions have, by id; what nodes keep ready is in their pools (`/v1/admin/nodes`)."""
    rows = await sandboxes.all_live(db, node, limit + 1, after)
    return page_of([_sandbox(row) for row in rows[:limit]], len(rows) > limit)


def _sandbox(row: Mapping[str, Any]) -> SandboxOut:
    return SandboxOut(
        id=row["sandbox_id"],
        session_id=row["session_id"],
        session_state=row["session"],
        tenant=row["tenant_id"],
        node=row["node_id"],
        backend=row["driver"],
        state=row["state"],
        created_at=row["created_at"].isoformat(),
    )


def _tiers(name: str, told: Mapping[str, Any]) -> KvOut:
    if "error" in told:
        return KvOut(id=name, error=told["error"])
    stats = told["stats"]
    return KvOut(
        id=name,
        device=stats["pool"],
        break_even=stats.get("break_even") or {},
        **_only(stats, "tiers", "pinned_pages", "quarantined", "integrity"),
        **_only(stats["counters"], "prefetched", "prefetched_unused", "recomputed_tokens"),
    )


def _only(told: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: told[name] for name in names if name in told}


async def of_nodes(
    request: Request, db: Database, tenant: str, kind: str, asked: dict[str, Any], node: str | None, within_s: float
) -> list[tuple[str, Mapping[str, Any]]]:
    """What each node answers, by its name; `error` is why one did not. Raises NotFound."""
    alive = [row for row in await fleet.nodes(db) if row["alive"] and node in (None, row["node_id"])]
    if node is not None and not alive:
        raise NotFound(f"there is no node {node} that is up")

    async def one(row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        errand_id = new_id("err")
        await errands.ask(db, tenant, errand_id, kind, asked, None)
        try:
            done = await carried_out(request, db, errand_id, "", row["queue"], within_s=within_s)
            return row["node_id"], done.result or {}
        except Unavailable as away:
            return row["node_id"], {"error": str(away)}
        finally:
            await errands.forget(db, errand_id)

    return list(await asyncio.gather(*(one(row) for row in alive)))
