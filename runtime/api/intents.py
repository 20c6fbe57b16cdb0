"""`POST /v1/sessions/{id}/kv/{intent}`: pin, offload, prefetch, release, at once, whatever the session does."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field

from runtime.api import views
from runtime.api.asking import carried_out
from runtime.api.documented import Id, Shape, refusals
from runtime.api.guard import Db, Tenant
from runtime.api.idempotency import id_for, made_before
from runtime.config import Body
from runtime.errors import InvalidRequest, Unavailable
from runtime.store import errands

router = APIRouter(prefix="/v1/sessions/{session_id}/kv", tags=["kv"])

Intent = Literal["pin", "offload", "prefetch", "release"]
_NOTHING: dict[str, Any] = {"status": "missing", "tier": None, "pages": 0, "bytes": 0, "ms": 0.0}
_NOTHING["detail"] = "the session has no pages: nothing of it has been computed yet"
_TAKES = {"tier": "offload", "ttl_s": "pin"}


class IntentIn(Body):
    """The body of an intent. `tier`: where an offload goes, `auto` for where the policy says; `ttl_s`: a pin ends by
    itself after so many seconds; `wait`: the receipt comes when the copy has ended, not when it has begun."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tier": "host"}, {}]})

    tier: Literal["host", "nvme", "shared", "auto"] | None = None
    ttl_s: float | None = Field(default=None, gt=0, le=31_536_000)
    wait: bool = False


class Receipt(Shape):
    """What became of an intent: `accepted`, `clipped` (a part of it), `deferred` (under way), `rejected` (`detail`
    says why), or `missing` (there are no pages)."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "id": "kvi_0f",
                    "object": "kv.receipt",
                    "session_id": "ses_0a",
                    "intent": "offload",
                    "status": "deferred",
                    "tier": "host",
                    "pages": 12,
                    "bytes": 4423680,
                    "ms": 0.4,
                    "detail": "0 pages were below already",
                    "epoch": 1,
                }
            ]
        },
    )

    id: str
    object: Literal["kv.receipt"] = "kv.receipt"
    session_id: str
    intent: Intent
    status: Literal["accepted", "clipped", "deferred", "rejected", "missing", "external"]
    tier: str | None = Field(description="Where an offload goes.")
    pages: int
    bytes: int
    ms: float = Field(description="Milliseconds that the engine took to answer.")
    detail: str
    epoch: int = Field(description="The session's epoch, under which the intent counts.")


@router.post("/{intent}", responses=refusals(404, 409))
async def intend(
    session_id: Id, intent: Intent, request: Request, db: Db, tenant: Tenant, body: IntentIn | None = None
) -> Receipt:
    """Say where the session's pages should be: keep them on the device (`pin`), copy them to a tier (`offload`), bring
    them back (`prefetch`), stop keeping them (`release`). A hint with a receipt: tokens are the same in any case."""
    row = await views.owned(db, tenant, session_id)
    asked = body or IntentIn()
    for field, takes in _TAKES.items():
        if getattr(asked, field) is not None and intent != takes:
            raise InvalidRequest(f"{field}: only {takes} takes it, not {intent}", param=field)
    errand_id = await made_before(request, db, tenant) or await id_for(request, db, tenant, "kvi")
    if row["state"] == "created" or row["node_id"] is None:
        return Receipt(id=errand_id, session_id=session_id, intent=intent, epoch=row["epoch"], **_NOTHING)
    await errands.ask(db, tenant, errand_id, "kv", {"intent": intent, **asked.model_dump()}, session_id)
    queues = await errands.queues(db, row["node_id"])
    if not queues:
        raise Unavailable("no node is up")
    done = await carried_out(request, db, errand_id, session_id, queues[0])
    about = {"id": errand_id, "session_id": session_id, "intent": intent}
    return Receipt.model_validate({**about, **(done.result or {})})
