"""`/v1/usage` and `/v1/admin/usage`: what was used, and what it costs by the operator's price file."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import Field

from runtime.api.documented import After, Page, Shape
from runtime.api.guard import Db, Tenant, admin
from runtime.api.tenants import TenantName
from runtime.api.times import Time
from runtime.errors import InvalidRequest
from runtime.prices import Prices
from runtime.store import Database, usage
from runtime.store.usage import GroupBy, Used

router = APIRouter(prefix="/v1/usage", tags=["usage"])
admin_router = APIRouter(prefix="/v1/admin/usage", tags=["usage"], dependencies=[Depends(admin)])

DAYS = 30


From = Annotated[Time | None, Query(alias="from", description="Thirty days ago where it is not given.")]
To = Annotated[Time | None, Query(alias="to", description="Now where it is not given.")]
Format = Literal["json", "csv"]
OfSession = Annotated[str | None, Query(min_length=1, max_length=200, description="Only what this session used.")]
Many = Annotated[int, Query(ge=1, le=10_000, description="How many groups at most.")]
_AS_CSV: dict[int | str, dict[str, Any]] = {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}


class UsageOut(Shape):
    """What a group used. Tokens of prompts are told by where their KV came from; null: nobody knows. Steps count in
    the time in which they ended, sandboxes and pages in tiers while they lasted."""

    id: str = Field(description="The tenant, session, model or day (UTC).")
    object: Literal["usage"] = "usage"
    sampled_tokens: int
    prefilled_tokens: int | None = Field(description="Computed by the engine: new ones, and those recomputed.")
    cached_tokens: int | None = Field(description="Of which the KV was there: recomputing them was avoided.")
    device: int | None = Field(description="Cached tokens that lay on the device.")
    host: int | None
    nvme: int | None
    shared: int | None
    recomputed: int | None = Field(description="Prefilled tokens that had their KV once.")
    computed: int | None = Field(description="Prefilled tokens that were new.")
    engine_s: float | None = Field(description="From a think's first turn in the engine to its last token.")
    avoided_s: float | None = Field(description="What prefilling the cached tokens would take, at the speed measured.")
    host_byte_hours: float | None
    nvme_byte_hours: float | None
    shared_byte_hours: float | None
    sandbox_s: float
    tool_s: float
    sessions: int = Field(description="That ended a step.")
    steps: int
    unknown_steps: int = Field(description="Thinks of which the engine's account is not known; they are not summed.")
    cost: float | None = Field(description="Null where there is no price file, or what has a price is not known.")
    currency: str | None


@router.get("", responses=_AS_CSV, response_model=Page[UsageOut])
async def own(
    request: Request,
    db: Db,
    tenant: Tenant,
    group_by: GroupBy = "day",
    since: From = None,
    until: To = None,
    format: Format = "json",
    session: OfSession = None,
    limit: Many = 1000,
    after: After = None,
) -> Any:
    """What this tenant used, or one session of it."""
    return _answer(await _rows(request, db, group_by, tenant, since, until, session), limit, after, format)


@admin_router.get("", responses=_AS_CSV, response_model=Page[UsageOut])
async def everybodys(
    request: Request,
    db: Db,
    group_by: GroupBy = "tenant",
    since: From = None,
    until: To = None,
    format: Format = "json",
    tenant: Annotated[TenantName | None, Query()] = None,
    limit: Many = 1000,
    after: After = None,
) -> Any:
    """What all tenants used, or one."""
    return _answer(await _rows(request, db, group_by, tenant, since, until), limit, after, format)


async def _rows(
    request: Request,
    db: Database,
    group_by: GroupBy,
    tenant: str | None,
    since: datetime.datetime | None,
    until: datetime.datetime | None,
    session: str | None = None,
) -> list[UsageOut]:
    until = until or datetime.datetime.now(datetime.UTC)
    if since is None:
        begin = until - datetime.timedelta(days=min(DAYS, (until - _FIRST).days))
        since = begin.replace(hour=0, minute=0, second=0, microsecond=0)
    if since > until:
        raise InvalidRequest("from lies after to; swap them", param="from")
    found = await usage.summed(db, group_by, tenant, since, until, session)
    prices: Prices | None = request.app.state.prices
    groups: dict[str, list[Used]] = {}
    for one in found:
        groups.setdefault(one.key, []).append(one)
    return [_shown(key, of_key, prices) for key, of_key in sorted(groups.items())]


_FIRST = datetime.datetime(1, 1, 1, tzinfo=datetime.UTC)


def _shown(key: str, parts: Sequence[Used], prices: Prices | None) -> UsageOut:
    """A group: what it used of every model."""
    measures: dict[str, Any] = {name: total(part.measures[name] for part in parts) for name in parts[0].measures}
    costs = [prices.cost(part.model, part.measures) for part in parts] if prices else [None]
    cost = None if any(one is None for one in costs) else sum((one for one in costs if one is not None), Decimal(0))
    return UsageOut(
        id=key,
        **measures,
        cost=None if cost is None else round(float(cost), 6),
        currency=prices.currency if prices else None,
    )


def total(values: Iterable[Any]) -> Any:
    """None where one is."""
    known = list(values)
    if any(value is None for value in known):
        return None
    return round(sum(known), 6) if isinstance(known[0], float) else sum(known)


def _answer(rows: Sequence[UsageOut], limit: int, after: str | None, format: Format) -> Page[UsageOut] | Response:
    if after is not None and after not in {row.id for row in rows}:
        raise InvalidRequest(f"after is {after!r}, which is no group; use the last_id of a page", param="after")
    rest = [row for row in rows if after is None or row.id > after]
    data = rest[:limit]
    if format == "csv":
        return Response(_as_csv(data), media_type="text/csv; charset=utf-8")
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return Page(data=data, has_more=len(rest) > limit, first_id=first, last_id=last)


def _as_csv(rows: Iterable[UsageOut]) -> str:
    """A row of names, then one for each group; what is not known is empty."""
    out = io.StringIO()
    names = [name for name in UsageOut.model_fields if name != "object"]
    writer = csv.DictWriter(out, names, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(row.model_dump(exclude={"object"}) for row in rows)
    return out.getvalue()
