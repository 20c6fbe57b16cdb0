"""`/v1/admin/doctor`: what is wrong with nodes, why, and what to do; what engines' time went into; what support needs.
A node that is away is told of by what is known without it."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field

from runtime import bundle, deaths, doctor
from runtime.api.admin import state_of
from runtime.api.admin_kv import ASK_S, NodeName
from runtime.api.asking import of_nodes
from runtime.api.documented import Id, Page, Shape, page_of, refusals
from runtime.api.guard import Db, Tenant, admin
from runtime.errors import NotFound
from runtime.sealing import Sealer, SealError
from runtime.settings import Settings
from runtime.store import Database, fleet, search, vault

router = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Depends(admin)], responses=refusals(404))

Part = Literal["memory", "pool", "tail", "precision", "speculation"]
RECENT_S = 86_400.0


class RemedyOut(Shape):
    """What to set, what it would bring here, what it takes. `gain`: the figure of the effect; 0: none here."""

    set: str
    effect: str
    cost: str
    gain: float
    unit: str


class FindingOut(Shape):
    """Something that is wrong. `name` is in docs/doctor.md; `evidence`: figures by name; `remedies`: best first."""

    name: str
    severity: Literal["critical", "warning", "advice"]
    evidence: dict[str, Any]
    cause: str
    remedies: list[RemedyOut]


class ReportOut(Shape):
    """One part of one node. `notes`: what was looked at and what was ruled out, in its order; `away`: why it could not
    be looked at, or only from outside."""

    id: str
    object: Literal["doctor.report"] = "doctor.report"
    node: str
    part: Part
    findings: list[FindingOut]
    notes: list[str]
    away: str | None


class SpansOut(Shape):
    """What an engine's time went into: `spans` has its latest steps (rows under `columns`) and the long waits for
    tokens with the seconds of each by cause; `memory`: what it owes and takes; `limits`: what it runs within. `error`:
    why it did not answer."""

    id: str = Field(description="The node's name.")
    object: Literal["engine.spans"] = "engine.spans"
    spans: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    limits: dict[str, Any] | None = None
    error: str | None = None


class BundleOut(Shape):
    """What a support person needs, without anything that sessions say, token ids, keys or secrets. `parts`: by the name
    of their file; `logs`: their ends, scrubbed; `missing`: what could not be had, and why."""

    object: Literal["bundle"] = "bundle"
    made_at: datetime.datetime
    parts: dict[str, Any]
    logs: dict[str, str]
    missing: dict[str, str]


@router.get("/doctor")
async def examine(
    request: Request,
    db: Db,
    tenant: Tenant,
    part: Annotated[Part | None, Query(description="Only this part; all by default.")] = None,
    node: NodeName = None,
) -> Page[ReportOut]:
    """What is wrong with every node, why, and what to do about it: memory, pool, tail, precision, speculation."""
    told = await _told(request, db, tenant, node)
    return page_of([ReportOut.model_validate(one) for one in await _reports(request, told, part)], False)


@router.get("/engines/{node_id}/spans")
async def engine_spans(node_id: Id, request: Request, db: Db, tenant: Tenant) -> SpansOut:
    """What the engine of a node did lately, step by step, and what its long waits were made of."""
    ((name, told),) = await of_nodes(request, db, tenant, "doctor", {}, node_id, ASK_S)
    return SpansOut(id=name, error=told.get("error"), **told.get("engine", {}))


@router.get("/doctor/bundle")
async def bundle_of(request: Request, db: Db, tenant: Tenant) -> BundleOut:
    """Everything that a support person needs of this installation, and nothing that is its users'."""
    settings: Settings = request.app.state.settings
    told = await _told(request, db, tenant, None)
    missing = {f"engine of {name}": one["error"] for name, one in told.items() if "error" in one}
    scrubber = bundle.Scrubber([*bundle.secret_values(settings), *await _secrets(db, request.app.state.sealer)])
    logs = await asyncio.to_thread(bundle.logs, settings, scrubber)
    if not logs:
        missing["logs"] = "this process of the API has none: they are where `tenuto up` or the processes run"
    parts = {
        "versions.json": bundle.versions(),
        "settings.json": bundle.shown(settings),
        "migrations.json": await search.migrations(db),
        "counts.json": await search.overview(db),
        "nodes.json": [_node(row) for row in await fleet.nodes(db)],
        "findings.json": await _reports(request, told, None),
        "engines.json": {name: _figures(one) for name, one in told.items()},
        "deaths.json": [asdict(one) for one in deaths.everyone(settings.logs_dir)],
    }
    made_at = datetime.datetime.now(datetime.UTC)
    return BundleOut(made_at=made_at, parts=scrubber.value(parts), logs=logs, missing=scrubber.value(missing))


async def _told(request: Request, db: Database, tenant: str, node: str | None) -> dict[str, Mapping[str, Any]]:
    """What nodes that are up answer, by name; why not, of those that are away and were asked for by name, or whose
    engine ended lately. Raises NotFound for a node that there never was."""
    rows = {row["node_id"]: row for row in await fleet.nodes(db) if node in (None, row["node_id"])}
    ended = [name for name, one in _deaths(request.app.state.settings).items() if one.age_s < RECENT_S]
    if node is not None and not rows and node not in ended:
        raise NotFound(f"there is no node {node}")
    up = any(row["alive"] for row in rows.values())
    told = dict(await of_nodes(request, db, tenant, "doctor", {}, node, ASK_S)) if up else {}
    silent = {*([node] if node is not None else ended)} - set(told)
    return told | {name: {"error": f"{name} is down"} for name in sorted(silent)}


async def _reports(request: Request, told: Mapping[str, Mapping[str, Any]], part: str | None) -> list[dict[str, Any]]:
    settings: Settings = request.app.state.settings
    found: list[dict[str, Any]] = []
    for name, one in told.items():
        if "error" in one:
            figures = await asyncio.to_thread(doctor.of_silence, settings, name, one["error"])
        else:
            figures = doctor.of_engine(name, one, doctor.death_of(settings, name))
        found += doctor.reports(figures, part)
    return found


def _deaths(settings: Settings) -> dict[str, deaths.Death]:
    """Of the engines of nodes of this home."""
    found = {node: doctor.death_of(settings, node) for node in doctor.seats_here(settings)}
    return {node: death for node, death in found.items() if death is not None}


async def _secrets(db: Database, sealer: Sealer) -> list[str]:
    """Every tenant's, so that none is told."""
    values = []
    for row in await vault.everybodys(db):
        try:
            values.append(sealer.open(row["tenant_id"], row["name"], row["sealed"]))
        except SealError:
            continue  # nor could anybody else tell it
    return values


def _node(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("node_id", "boot", "age_s", "sessions", "running", "sandboxes", "sandbox")
    return {**{name: row[name] for name in names}, "state": state_of(row), "model": row["card"].get("model")}


def _figures(told: Mapping[str, Any]) -> dict[str, Any]:
    """Of an engine; its tiers' places and its card's are no secrets."""
    return {name: told[name] for name in ("card", "stats", "engine", "workspaces", "error") if name in told}
