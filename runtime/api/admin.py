"""`/v1/admin`: what an operator asks of the installation. It takes a key of scope admin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request

from runtime import reconcile
from runtime.api.documented import Id, Page, Shape, refusals
from runtime.api.guard import Admin, Db
from runtime.store import fleet

router = APIRouter(prefix="/v1/admin", tags=["admin"])


class NodeOut(Shape):
    """A node as its last heartbeat left it. `sandboxes`: its driver, the limits that hold, and its pool."""

    id: str
    object: Literal["node"]
    state: Literal["up", "draining", "drained", "down"]
    boot: str
    model: str
    sandbox: str | None
    sandboxes: dict[str, Any]
    engine: str | None
    heartbeat_age_s: float
    sessions: int
    running: int


class ReconciliationOut(Shape):
    """How many sessions are open; of these: how many run, were started again, have had no message, could not be
    reached."""

    object: Literal["reconciliation"]
    open: int
    running: int
    restarted: int
    not_begun: int
    failed: int


@router.get("/nodes", response_model=Page[NodeOut])
async def list_nodes(db: Db, _: Admin) -> dict[str, Any]:
    """Every node that has ever been here: its state, how old its last heartbeat is, and its open sessions."""
    data = [_node(row) for row in await fleet.nodes(db)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, "has_more": False, **ends}


@router.post("/nodes/{node_id}/drain", status_code=202, response_model=NodeOut, responses=refusals(404))
async def drain(node_id: Id, db: Db, _: Admin) -> dict[str, Any]:
    """The node takes no more sessions, and hands over those that it has. Idempotent; follow it with GET."""
    await fleet.ask_to_drain(db, node_id)
    return next(_node(row) for row in await fleet.nodes(db) if row["node_id"] == node_id)


@router.post("/nodes/{node_id}/undrain", status_code=202, response_model=NodeOut, responses=refusals(404, 409))
async def undrain(node_id: Id, db: Db, _: Admin) -> dict[str, Any]:
    """A node that drains, or is drained, ends its process; started again, as whatever watches over it does, it takes
    sessions. Follow it with GET: its boot changes."""
    await fleet.ask_back(db, node_id)
    return next(_node(row) for row in await fleet.nodes(db) if row["node_id"] == node_id)


@router.post("/reconcile", response_model=ReconciliationOut)
async def reconcile_sessions(request: Request, db: Db, _: Admin) -> dict[str, Any]:
    """Make sure that every open session has a workflow, and say of how many that was not so."""
    return {"object": "reconciliation", **(await reconcile.everything(request.app.state.temporal, db)).as_json()}


def state_of(row: Mapping[str, Any]) -> str:
    """Of a node: up, draining, drained or down."""
    if not row["alive"]:
        return "down"
    if row["draining"]:
        return "drained" if row["drained_at"] else "draining"
    return "up"


def _node(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["node_id"],
        "object": "node",
        "state": state_of(row),
        "boot": row["boot"],
        "model": row["card"]["model"],
        "sandbox": row["sandbox"].get("backend"),
        "sandboxes": {**row["sandbox"], "live": row["sandboxes"]},
        "engine": row["engine"],
        "heartbeat_age_s": round(row["age_s"], 1),
        "sessions": row["sessions"],
        "running": row["running"],
    }
