"""`/v1/webhooks`: told of events at an address of the tenant's, as Standard Webhooks has it."""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any, Literal, Self

import asyncpg
from fastapi import APIRouter, Query, Request
from pydantic import ConfigDict, Field, field_validator, model_validator

from runtime import webhooks
from runtime.api import views
from runtime.api.documented import After, Id, Limit, Page, Shape, refusals
from runtime.api.guard import Db, Tenant
from runtime.api.idempotency import id_for, made_before
from runtime.config import Body
from runtime.errors import InvalidRequest
from runtime.store import webhooks as store
from runtime.tools.kinds import http_url
from sandbox import EgressRefused

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])

_TYPE = re.compile(r"[a-z_]{1,40}\.([a-z_]{1,40}|\*)")
_EXAMPLE: dict[str, Any] = {
    "url": "https://hooks.example.org/tenuto",
    "types": ["session.idle", "session.failed", "budget.*"],
    "description": "Tells the team's channel.",
}
State = Literal["pending", "delivered", "failed", "cancelled"]


def _types(value: list[str]) -> list[str]:
    for one in value:
        if not _TYPE.fullmatch(one):
            raise ValueError(f"{one[:100]!r} is no event type; give one such as session.idle, or session.*")
        if one in ("model.delta", "model.*"):
            raise ValueError(f"{one}: comes many times a second; follow the session's stream instead")
    return list(dict.fromkeys(value))


Url = Annotated[str, Field(min_length=1, max_length=2000)]
Types = Annotated[list[str], Field(min_length=1, max_length=32)]
Description = Annotated[str, Field(max_length=2000)]


class WebhookIn(Body):
    """The body of POST /v1/webhooks. `types`: of events, such as `session.idle`, or `session.*` for all of a kind."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    url: Url
    types: Types
    description: Description = ""

    _url = field_validator("url")(http_url)
    _types = field_validator("types")(_types)


class ChangeIn(Body):
    """The body of PATCH: what is not given stays. What is enabled again is not told of what happened meanwhile."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"disabled": True}]})

    url: Url | None = None
    types: Types | None = None
    description: Description | None = None
    disabled: bool | None = None

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        return None if value is None else http_url(value)

    @field_validator("types")
    @classmethod
    def _known(cls, value: list[str] | None) -> list[str] | None:
        return None if value is None else _types(value)

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.model_dump(exclude_none=True):
            raise ValueError("give what is to change: url, types, description or disabled")
        return self


class RotateIn(Body):
    """The body of POST …/rotate: for how long the present secret signs beside the new one."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"overlap_s": 86400}]})

    overlap_s: float = Field(default=86_400, ge=0, le=30 * 86_400)


class WebhookOut(Shape):
    """A webhook. Its secret is shown when it is made, and never again."""

    id: str
    object: Literal["webhook"] = "webhook"
    url: str
    types: list[str]
    description: str
    disabled: bool
    disabled_why: str | None
    old_secret_until: datetime.datetime | None = Field(description="Until when deliveries have a second signature.")
    created_at: datetime.datetime
    updated_at: datetime.datetime


class SecretOut(WebhookOut):
    """With its new secret, once: a repeated request shows none."""

    secret: str | None


class DeliveryOut(Shape):
    """What is or was sent. Its id is the `webhook-id` of every try."""

    id: str
    object: Literal["webhook.delivery"] = "webhook.delivery"
    webhook: str
    type: str
    session_id: str | None
    event: int | None = Field(description="The event's position.")
    state: State
    round: int = Field(description="Rises with every replay.")
    attempts: int
    last_status: int | None
    last_error: str | None
    next_try_at: datetime.datetime | None
    created_at: datetime.datetime
    ended_at: datetime.datetime | None


class Deleted(Shape):
    id: str
    object: Literal["webhook"] = "webhook"
    deleted: bool = True


@router.post("", status_code=201, responses=refusals(409))
async def create(body: WebhookIn, request: Request, db: Db, tenant: Tenant) -> SecretOut:
    """Make a webhook. The host must be one that the operator lists in TENUTO_EGRESS_ALLOW."""
    before = await made_before(request, db, tenant)
    if before is None:
        _ensure_reachable(request, body.url)
    webhook_id = before or await id_for(request, db, tenant, "whk")
    secret = webhooks.new_secret()
    kept = request.app.state.sealer.seal(tenant, webhooks.SECRET, secret)
    is_new = await store.create(db, tenant, webhook_id, body.url, body.types, body.description, kept)
    return SecretOut(**_view(await store.get(db, tenant, webhook_id)), secret=secret if is_new else None)


@router.get("")
async def list_webhooks(db: Db, tenant: Tenant, limit: Limit = 100, after: After = None) -> Page[WebhookOut]:
    """Webhooks of the tenant, oldest first."""
    rows = await store.listed(db, tenant, limit, after)
    return Page[WebhookOut](**views.page([_view(row) for row in rows], limit))


@router.get("/{webhook_id}", responses=refusals(404))
async def get(webhook_id: Id, db: Db, tenant: Tenant) -> WebhookOut:
    """One webhook, without its secret."""
    return WebhookOut(**_view(await store.get(db, tenant, webhook_id)))


@router.patch("/{webhook_id}", responses=refusals(404))
async def change(webhook_id: Id, body: ChangeIn, request: Request, db: Db, tenant: Tenant) -> WebhookOut:
    """Change what is given, and leave the rest."""
    if body.url is not None:
        _ensure_reachable(request, body.url)
    await store.change(db, tenant, webhook_id, body.model_dump(exclude_none=True))
    return await get(webhook_id, db, tenant)


@router.delete("/{webhook_id}", responses=refusals(404))
async def delete(webhook_id: Id, db: Db, tenant: Tenant) -> Deleted:
    """With all that was still to be sent there."""
    await store.delete(db, tenant, webhook_id)
    return Deleted(id=webhook_id)


@router.post("/{webhook_id}/rotate", responses=refusals(404, 409))
async def rotate(webhook_id: Id, body: RotateIn, request: Request, db: Db, tenant: Tenant) -> SecretOut:
    """A new secret; deliveries are signed with both until `overlap_s` has passed."""
    await store.get(db, tenant, webhook_id)
    request_id = await id_for(request, db, tenant, "rot")
    secret = webhooks.new_secret()
    kept = request.app.state.sealer.seal(tenant, webhooks.SECRET, secret)
    is_new = await store.rotate(db, tenant, webhook_id, request_id, kept, body.overlap_s)
    return SecretOut(**_view(await store.get(db, tenant, webhook_id)), secret=secret if is_new else None)


@router.post("/{webhook_id}/test", status_code=202, responses=refusals(404, 409))
async def test(webhook_id: Id, request: Request, db: Db, tenant: Tenant) -> DeliveryOut:
    """Send an event `webhook.test`, which tells of nothing."""
    await store.get(db, tenant, webhook_id)
    delivery_id = await id_for(request, db, tenant, "whd")
    await store.queue_test(db, tenant, webhook_id, delivery_id)
    return DeliveryOut(**_delivery(await store.delivery(db, tenant, webhook_id, delivery_id)))


@router.get("/{webhook_id}/deliveries", responses=refusals(404))
async def list_deliveries(
    webhook_id: Id,
    db: Db,
    tenant: Tenant,
    limit: Limit = 100,
    after: After = None,
    state: Annotated[State | None, Query()] = None,
) -> Page[DeliveryOut]:
    """Newest first."""
    await store.get(db, tenant, webhook_id)
    rows = await store.deliveries(db, tenant, webhook_id, limit, state, after)
    return Page[DeliveryOut](**views.page([_delivery(row) for row in rows], limit))


@router.post("/{webhook_id}/deliveries/{delivery_id}/replay", status_code=202, responses=refusals(404, 409))
async def replay(webhook_id: Id, delivery_id: Id, request: Request, db: Db, tenant: Tenant) -> DeliveryOut:
    """Send it again, with the same id and body: a receiver that had it knows."""
    await store.get(db, tenant, webhook_id)
    await store.delivery(db, tenant, webhook_id, delivery_id)
    await store.replay(db, tenant, webhook_id, delivery_id, await id_for(request, db, tenant, "rpl"))
    return DeliveryOut(**_delivery(await store.delivery(db, tenant, webhook_id, delivery_id)))


def _ensure_reachable(request: Request, url: str) -> None:
    try:
        request.app.state.egress.check(url)
    except EgressRefused as refused:
        raise InvalidRequest(f"url: {refused}", param="url", code="host_not_allowed") from None


def _view(row: asyncpg.Record) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC)
    return {
        "id": row["webhook_id"],
        "url": row["url"],
        "types": row["types"],
        "description": row["description"],
        "disabled": row["disabled_at"] is not None,
        "disabled_why": row["disabled_why"],
        "old_secret_until": row["old_until"] if row["old_until"] and row["old_until"] > now else None,
        "created_at": row["created_at"],
        "updated_at": row["updated_at"],
    }


def _delivery(row: asyncpg.Record) -> dict[str, Any]:
    same = ("type", "session_id", "state", "round", "attempts", "last_status", "last_error", "created_at", "ended_at")
    return {
        "id": row["delivery_id"],
        "webhook": row["webhook_id"],
        "event": row["pos"],
        "next_try_at": row["next_at"] if row["state"] == "pending" else None,
        **{name: row[name] for name in same},
    }
