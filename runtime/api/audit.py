"""`/v1/admin/audit`: what operators changed, or tried to."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from runtime.api.documented import Limit, Page, Shape
from runtime.api.guard import Db, admin
from runtime.store import audit

router = APIRouter(prefix="/v1/admin/audit", tags=["audit"], dependencies=[Depends(admin)])

Outcome = Literal["done", "refused", "failed"]
Text = Annotated[str | None, Query(min_length=1, max_length=300)]
Before = Annotated[int | None, Query(ge=1, lt=2**63, description="The `last_id` of the page before this one.")]


class ActionOut(Shape):
    """Who (key) did what (action) to what (target), with which request, and what came of it."""

    id: int
    object: Literal["admin_action"] = "admin_action"
    created_at: datetime.datetime
    tenant: str = Field(description="Of the key.")
    key_id: str
    action: str
    target: str | None
    request_id: str
    outcome: Outcome
    detail: dict[str, Any]


@router.get("")
async def list_actions(
    db: Db,
    limit: Limit = 100,
    after: Before = None,
    key: Text = None,
    action: Text = None,
    target: Text = None,
    outcome: Outcome | None = None,
) -> Page[ActionOut]:
    """Newest first. The log is only ever added to."""
    rows = await audit.listed(
        db, key_id=key, action=action, target=target, outcome=outcome, before=after, limit=limit + 1
    )
    data = [_shown(row) for row in rows[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return Page(data=data, has_more=len(rows) > limit, first_id=first, last_id=last)


def _shown(row: Mapping[str, Any]) -> ActionOut:
    same = {name: row[name] for name in ActionOut.model_fields if name in row}
    return ActionOut(id=row["action_id"], tenant=row["tenant_id"], **same)
