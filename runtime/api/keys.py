"""`/v1/admin/keys`: keys are made, looked at, rotated and revoked here; `/v1/keys/self`: what a key says of itself."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

import asyncpg
from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict, Field, field_validator

from runtime.api.acting import Acting
from runtime.api.documented import After, Id, Limit, Page, Shape, refusals
from runtime.api.guard import Db, Tenant, Who, admin
from runtime.api.idempotency import id_for, made_before
from runtime.api.tenants import Quotas, TenantName, quotas_of
from runtime.api.times import Time
from runtime.config import Body
from runtime.store import audit, keys, tenants

router = APIRouter(prefix="/v1/keys", tags=["keys"])
admin_router = APIRouter(prefix="/v1/admin/keys", tags=["keys"], dependencies=[Depends(admin)])

MAX_GRACE_S = 30 * 86_400
_EXAMPLE: dict[str, Any] = {"tenant": "default", "scope": "use", "name": "ci", "requests_per_minute": 600}
_SHOWN: dict[str, Any] = {
    "id": "key_5f0c2a91d3e84b67a9c1f2d3",
    "object": "key",
    **_EXAMPLE,
    "prefix": "tk_Zk3vQ9aX",
    "state": "active",
    "created_at": "2026-11-30T12:00:00Z",
    "expires_at": None,
    "last_used_at": None,
    "revoked_at": None,
    "rotated_to": None,
}


class KeyIn(Body):
    """The body of POST /v1/admin/keys. `use`: sessions of the tenant; `admin`: besides, all of /v1/admin."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    tenant: TenantName = "default"
    scope: Literal["use", "admin"] = "use"
    name: str = Field(default="", max_length=200)
    expires_at: Time | None = None
    requests_per_minute: int | None = Field(default=None, strict=True, ge=1, le=1_000_000)

    @field_validator("expires_at")
    @classmethod
    def _lies_ahead(cls, value: datetime.datetime | None) -> datetime.datetime | None:
        now = datetime.datetime.now(datetime.UTC)
        if value is not None and not now < value < now + datetime.timedelta(days=36_500):
            raise ValueError("give a time that lies ahead, by a hundred years at most")
        return value


class RotateIn(Body):
    """The body of POST …/rotate: how long the old key goes on working, in seconds, up to thirty days."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"grace_s": 86_400}]})

    grace_s: int = Field(default=0, strict=True, ge=0, le=MAX_GRACE_S)


class KeyOut(Shape):
    """A key, by what may be shown of it. `last_used_at` is right to the minute; `rotated_to`: its successor."""

    model_config = ConfigDict(json_schema_extra={"examples": [_SHOWN]})

    id: str
    object: Literal["key"] = "key"
    tenant: str
    scope: Literal["use", "admin"]
    name: str
    prefix: str = Field(description="The first characters of the key.")
    state: Literal["active", "expired", "revoked"]
    requests_per_minute: int | None
    created_at: datetime.datetime
    expires_at: datetime.datetime | None
    last_used_at: datetime.datetime | None
    revoked_at: datetime.datetime | None
    rotated_to: str | None


class KeyMade(KeyOut):
    """A new key. `key` is shown this once; null where the same Idempotency-Key made it before."""

    model_config = ConfigDict(json_schema_extra={"examples": [{**_SHOWN, "key": None}]})

    key: str | None


class OwnKey(Shape):
    """What a key says of itself, and what its tenant may use."""

    id: str
    object: Literal["key"] = "key"
    tenant: str
    scope: Literal["use", "admin"]
    name: str
    requests_per_minute: int | None
    expires_at: datetime.datetime | None
    quotas: Quotas


@router.get("/self")
async def own(db: Db, caller: Who) -> OwnKey:
    """The key that this request is sent with."""
    row = await keys.get(db, caller.key_id)
    quotas = quotas_of(await tenants.get(db, caller.tenant_id))
    names = ("scope", "name", "requests_per_minute", "expires_at")
    return OwnKey(id=caller.key_id, tenant=caller.tenant_id, quotas=quotas, **{name: row[name] for name in names})


@admin_router.post("", status_code=201, responses=refusals(409))
async def create(body: KeyIn, request: Request, db: Db, tenant: Tenant, act: Acting) -> KeyMade:
    """Make a key. It is in this answer and nowhere else, so keep it."""
    key_id = await made_before(request, db, tenant) or await id_for(request, db, tenant, "key")
    new = keys.NewKey(body.tenant, body.scope, body.name, body.expires_at, body.requests_per_minute)
    key = keys.make()

    async def work(connection: asyncpg.Connection) -> bool:
        made = await keys.insert(connection, key_id, key, new)
        if made:
            about = body.model_dump(mode="json", include={"tenant", "scope", "name", "requests_per_minute"})
            await audit.note(connection, act, key_id, detail=about)
        return made

    return await _shown_once(db, key_id, key, await db.run(work))


async def _shown_once(db: Db, key_id: str, key: str, made: bool) -> KeyMade:
    """The key itself where this request made it, also where the answer to its transaction was lost."""
    row = await keys.get(db, key_id)
    return KeyMade(**_fields(row), key=key if made or row["sha256"] == keys.digest(key) else None)


@admin_router.get("")
async def list_keys(
    db: Db, limit: Limit = 100, after: After = None, tenant: Annotated[TenantName | None, Query()] = None
) -> Page[KeyOut]:
    """Newest first, those that do not work any more too."""
    rows = await keys.listed(db, tenant, after, limit + 1)
    data = [KeyOut(**_fields(row)) for row in rows[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return Page(data=data, has_more=len(rows) > limit, first_id=first, last_id=last)


@admin_router.get("/{key_id}", responses=refusals(404))
async def get(key_id: Id, db: Db) -> KeyOut:
    """One key: what it may, when it was used, never the key itself."""
    return KeyOut(**_fields(await keys.get(db, key_id)))


@admin_router.post("/{key_id}/revoke", responses=refusals(404, 409))
async def revoke(key_id: Id, db: Db, act: Acting) -> KeyOut:
    """The key works no more, from the next request on. Idempotent. The last admin key that works cannot be revoked."""

    async def work(connection: asyncpg.Connection) -> None:
        if await keys.revoke(connection, key_id):
            await audit.note(connection, act, key_id)

    await db.run(work)
    return KeyOut(**_fields(await keys.get(db, key_id)))


@admin_router.post("/{key_id}/rotate", status_code=201, responses=refusals(404, 409))
async def rotate(key_id: Id, body: RotateIn, request: Request, db: Db, tenant: Tenant, act: Acting) -> KeyMade:
    """A new key in the place of this one, with its scope, name, rate and end; the old one works for `grace_s` more."""
    await keys.get(db, key_id)
    new_id = await made_before(request, db, tenant) or await id_for(request, db, tenant, "key")
    key = keys.make()

    async def work(connection: asyncpg.Connection) -> bool:
        made = await keys.rotate(connection, key_id, new_id, key, body.grace_s)
        if made:
            await audit.note(connection, act, key_id, detail={"rotated_to": new_id, "grace_s": body.grace_s})
        return made

    return await _shown_once(db, new_id, key, await db.run(work))


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    state = "revoked" if row["revoked_at"] else "active" if row["lives"] else "expired"
    same = {name: row[name] for name in KeyOut.model_fields if name in row}
    return {"id": row["key_id"], "tenant": row["tenant_id"], "state": state, **same}
