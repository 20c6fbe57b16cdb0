"""`/v1/secrets`: values that tools use by name. They are written and never shown again."""

from __future__ import annotations

from typing import Annotated, Any

import asyncpg
from fastapi import APIRouter, Path, Request
from pydantic import ConfigDict, Field

from runtime.api.documented import After, Limit, Page, Shape, refusals
from runtime.api.guard import Db, Tenant
from runtime.config import Body
from runtime.store import vault

router = APIRouter(prefix="/v1/secrets", tags=["secrets"])

Name = Annotated[str, Path(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$", description="The secret's name.")]
_EXAMPLE: dict[str, Any] = {
    "id": "GITHUB_TOKEN",
    "object": "secret",
    "created_at": "2026-01-05T09:00:00+00:00",
    "updated_at": "2026-01-05T09:00:00+00:00",
    "last_used_at": None,
}


class SecretIn(Body):
    """The value: at most 64 KiB of text. One of fewer than six characters is not masked where a tool prints it."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"value": "ghp_…"}]})

    value: str = Field(min_length=1, max_length=65_536)


class SecretView(Shape):
    """All that can be seen of a secret. `last_used_at` is to the minute."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    id: str = Field(description="Its name.")
    object: str = "secret"
    created_at: str
    updated_at: str
    last_used_at: str | None


class Gone(Shape):
    id: str
    object: str
    deleted: bool = True


@router.get("")
async def list_secrets(db: Db, tenant: Tenant, limit: Limit = 100, after: After = None) -> Page[SecretView]:
    """By name. Values are shown nowhere."""
    rows = [view(row) for row in await vault.listed(db, tenant, limit, after)]
    return page_of(rows, limit)


@router.put("/{secret}")
async def put(secret: Name, body: SecretIn, request: Request, db: Db, tenant: Tenant) -> SecretView:
    """Make a secret, or replace its value: calls use the new one from now on."""
    sealer = request.app.state.sealer
    return view(await vault.put(db, tenant, secret, sealer.seal(tenant, secret, body.value), sealer.key_id))


@router.get("/{secret}", responses=refusals(404))
async def get(secret: Name, db: Db, tenant: Tenant) -> SecretView:
    """When it was set and last used. Never its value."""
    return view(await vault.get(db, tenant, secret))


@router.delete("/{secret}", responses=refusals(404))
async def delete(secret: Name, db: Db, tenant: Tenant) -> Gone:
    """A call that needs it is refused from now on, and says so."""
    await vault.delete(db, tenant, secret)
    return Gone(id=secret, object="secret")


def view(row: asyncpg.Record) -> SecretView:
    times: dict[str, Any] = {
        name: row[name].isoformat() if row[name] else None for name in ("created_at", "updated_at", "last_used_at")
    }
    return SecretView(id=row["name"], **times)


def page_of(rows: list[Any], limit: int) -> Page[Any]:
    """A list of shapes; `rows` holds one more than `limit` if there are more."""
    data = rows[:limit]
    ends = {"first_id": data[0].id, "last_id": data[-1].id} if data else {}
    return Page(data=data, has_more=len(rows) > limit, **ends)
