"""`/v1/admin/tenants`: whose things are kept apart, and how much each may use."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import asyncpg
from fastapi import APIRouter, Depends, Path, Request
from pydantic import ConfigDict, Field, StringConstraints

from runtime.api.acting import Acting
from runtime.api.documented import After, Limit, Page, Shape, refusals
from runtime.api.guard import Db, Tenant, admin
from runtime.api.idempotency import claim
from runtime.config import Body
from runtime.store import audit, tenants

router = APIRouter(prefix="/v1/admin/tenants", tags=["tenants"], dependencies=[Depends(admin)])

_PATTERN = r"^[a-z0-9-]{1,63}$"
TenantName = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=_PATTERN)]
TenantId = Annotated[str, Path(min_length=1, max_length=63, pattern=_PATTERN)]
_QUOTAS: dict[str, Any] = {"open_sessions": 100, "tokens_per_day": 5_000_000, "disk_bytes": 64 << 30, "sandboxes": 8}


class Quotas(Shape):
    """What a tenant may use; null: any amount. Sessions that are open, tokens sampled and prefilled in a day (UTC),
    bytes of workspaces of open sessions, sandboxes at once."""

    open_sessions: int | None
    tokens_per_day: int | None
    disk_bytes: int | None
    sandboxes: int | None


class QuotasIn(Body):
    """Quotas by name: null for any amount. What is not named stays as it is."""

    model_config = ConfigDict(json_schema_extra={"examples": [_QUOTAS]})

    open_sessions: int | None = Field(default=None, strict=True, ge=0, lt=2**31)
    tokens_per_day: int | None = Field(default=None, strict=True, ge=0, lt=2**53)
    disk_bytes: int | None = Field(default=None, strict=True, ge=0, lt=2**53)
    sandboxes: int | None = Field(default=None, strict=True, ge=1, lt=2**31)


class TenantIn(Body):
    """The body of POST /v1/admin/tenants."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": "acme", "quotas": _QUOTAS}]})

    id: TenantName
    quotas: QuotasIn = QuotasIn()


class TenantChange(Body):
    """The body of PATCH …/{tenant}."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"quotas": {"open_sessions": 10}}]})

    quotas: QuotasIn


class TenantOut(Shape):
    """A tenant. Keys of one that is disabled are refused; its sessions stay as they are."""

    id: str
    object: Literal["tenant"] = "tenant"
    state: Literal["enabled", "disabled"]
    quotas: Quotas
    created_at: datetime.datetime
    disabled_at: datetime.datetime | None


@router.post("", status_code=201, responses=refusals(409))
async def create(body: TenantIn, request: Request, db: Db, tenant: Tenant, act: Acting) -> TenantOut:
    """A tenant of that name, with a random salt of its own: nobody else finds its KV pages."""
    quotas = body.quotas.model_dump()

    async def work(connection: asyncpg.Connection) -> None:
        _, first = await claim(connection, request, tenant, {"id": body.id})
        if first:
            await tenants.create(connection, body.id, quotas)
            await audit.note(connection, act, body.id, detail={"quotas": quotas})

    await db.run(work)
    return _shown(await tenants.get(db, body.id))


@router.get("")
async def list_tenants(db: Db, limit: Limit = 100, after: After = None) -> Page[TenantOut]:
    """By name."""
    rows = await tenants.listed(db, after, limit + 1)
    data = [_shown(row) for row in rows[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return Page(data=data, has_more=len(rows) > limit, first_id=first, last_id=last)


@router.get("/{tenant_id}", responses=refusals(404))
async def get(tenant_id: TenantId, db: Db) -> TenantOut:
    """One tenant and its quotas."""
    return _shown(await tenants.get(db, tenant_id))


@router.patch("/{tenant_id}", responses=refusals(404))
async def change(tenant_id: TenantId, body: TenantChange, db: Db, act: Acting) -> TenantOut:
    """Set quotas. They hold for what is asked from now on."""
    quotas = body.quotas.model_dump(exclude_unset=True)

    async def work(connection: asyncpg.Connection) -> None:
        await tenants.set_quotas(connection, tenant_id, quotas)
        await audit.note(connection, act, tenant_id, detail={"quotas": quotas})

    await db.run(work)
    return _shown(await tenants.get(db, tenant_id))


@router.post("/{tenant_id}/disable", responses=refusals(404, 409))
async def disable(tenant_id: TenantId, db: Db, act: Acting) -> TenantOut:
    """Refuse all its keys; its sessions stay open. Idempotent. The tenant of the last admin key cannot be disabled."""

    async def work(connection: asyncpg.Connection) -> None:
        if await tenants.disable(connection, tenant_id):
            await audit.note(connection, act, tenant_id)

    await db.run(work)
    return _shown(await tenants.get(db, tenant_id))


@router.post("/{tenant_id}/enable", responses=refusals(404))
async def enable(tenant_id: TenantId, db: Db, act: Acting) -> TenantOut:
    """Its keys work again. Idempotent."""

    async def work(connection: asyncpg.Connection) -> None:
        if await tenants.enable(connection, tenant_id):
            await audit.note(connection, act, tenant_id)

    await db.run(work)
    return _shown(await tenants.get(db, tenant_id))


def quotas_of(row: Mapping[str, Any]) -> Quotas:
    return Quotas(**{name: row[name] for name in tenants.QUOTAS})


def _shown(row: Mapping[str, Any]) -> TenantOut:
    return TenantOut(
        id=row["tenant_id"],
        state="disabled" if row["disabled_at"] else "enabled",
        quotas=quotas_of(row),
        created_at=row["created_at"],
        disabled_at=row["disabled_at"],
    )
