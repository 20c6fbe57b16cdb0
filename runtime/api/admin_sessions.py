"""`/v1/admin/sessions` and `/v1/admin/overview`: what runs here, of every tenant, and how to stop much at once."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import asyncpg
from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict, Field, StringConstraints, model_validator

from runtime import delivery
from runtime.api.acting import Acting
from runtime.api.admin import state_of
from runtime.api.documented import After, Limit, Page, Shape, refusals
from runtime.api.guard import Db, Tenant, admin
from runtime.api.idempotency import claim, recorded
from runtime.api.sending import send
from runtime.api.tenants import TenantName
from runtime.config import Body
from runtime.errors import Conflict, InvalidRequest, NotFound
from runtime.store import Database, audit, fleet, search, sessions
from runtime.store.search import Filter, Order
from runtime.store.sessions import new_id
from workflows.states import TERMINAL, State

router = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Depends(admin)])

MOST = 10_000  # sessions that one request may cancel by a filter
AT_ONCE = 16
Tier = Literal["none", "device", "host", "nvme", "shared", "external"]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
SessionId = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:@~-]+$")]
Seconds = Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)]
_FILTER: dict[str, Any] = {"filter": {"states": ["idle"], "older_than_s": 86_400}, "expect": 12}


class AdminSession(Shape):
    """A session as an operator sees it: whose it is and where, not what it says."""

    id: str
    object: Literal["session"] = "session"
    tenant: str
    state: State
    waiting_for: str | None
    ending: str | None
    model: str
    node: str | None
    tier: Tier = Field(description="Where its KV was last seen.")
    epoch: int
    spent_tokens: int
    spent_steps: int
    error: dict[str, Any] | None
    created_at: datetime.datetime
    updated_at: datetime.datetime


class FilterIn(Body):
    """Which sessions: all of it holds. `older_than_s`: since they were created; `text`: a part of the id."""

    states: list[State] | None = Field(default=None, max_length=11)
    tenant: TenantName | None = None
    node: Name | None = None
    model: Name | None = None
    older_than_s: Annotated[Seconds, Field(strict=True)] | None = None
    tier: Tier | None = None
    text: Name | None = None

    def as_filter(self) -> Filter:
        states = None if self.states is None else [str(state) for state in self.states]
        return Filter(states, self.tenant, self.node, self.model, self.older_than_s, self.tier, self.text)


class CancelIn(Body):
    """The body of POST …/cancel: sessions by their ids, or a filter with how many open ones it is expected to find."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": ["ses_5f0c2a91d3e84b67"]}, _FILTER]})

    ids: list[SessionId] | None = Field(default=None, min_length=1, max_length=1000)
    filter: FilterIn | None = None
    expect: int | None = Field(default=None, strict=True, ge=0, le=MOST)

    @model_validator(mode="after")
    def _one_of_both(self) -> CancelIn:
        if (self.ids is None) == (self.filter is None):
            raise ValueError("give either ids or a filter")
        if (self.filter is None) != (self.expect is None):
            raise ValueError("expect: belongs to a filter, and a filter needs it")
        return self


class Cancelled(Shape):
    """What came of it: sessions that are being cancelled now, those that had ended before, and ids of none."""

    object: Literal["cancellation"] = "cancellation"
    cancelling: int
    ended_before: int
    missing: list[str]


class TokensToday(Shape):
    """Tokens of today (UTC): sampled, and of prompts by where their KV came from, as far as it is known."""

    sampled: int
    device: int
    host: int
    nvme: int
    shared: int
    recomputed: int
    computed: int


class ProcessOut(Shape):
    """What the process of the API that answers has counted since it started; see `runtime/api/counts.py`."""

    requests: int
    failed: int = Field(description="Answered with 5xx.")
    unauthenticated: int = Field(description="Answered with 401.")
    limited: int = Field(description="Answered with 429.")
    prompts: int = Field(description="Whose tokens were counted.")
    prompts_refused: int = Field(description="Of these, those that the context has no room for.")
    streams_open: int
    frames: int = Field(description="Events sent on streams.")
    frames_behind: int = Field(description="Of these, read from the table for one reader who was behind.")


class Overview(Shape):
    """The installation at a glance. `sessions` and `nodes`: how many there are in each state."""

    object: Literal["overview"] = "overview"
    sessions: dict[str, int]
    nodes: dict[str, int]
    questions_open: int
    sandboxes_live: int
    messages_waiting: int
    tokens_today: TokensToday
    process: ProcessOut


@router.get("/overview")
async def overview(request: Request, db: Db) -> Overview:
    """How much there is of everything, now."""
    nodes: dict[str, int] = {}
    for row in await fleet.nodes(db):
        nodes[state_of(row)] = nodes.get(state_of(row), 0) + 1
    process = ProcessOut(**asdict(request.app.state.counts))
    return Overview(nodes=nodes, process=process, **await search.overview(db))


@router.get("/sessions")
async def list_sessions(
    db: Db,
    state: Annotated[list[State] | None, Query(description="One or several.")] = None,
    tenant: Annotated[TenantName | None, Query()] = None,
    node: Annotated[Name | None, Query()] = None,
    model: Annotated[Name | None, Query()] = None,
    older_than_s: Annotated[Seconds | None, Query(description="Since they were created.")] = None,
    tier: Annotated[Tier | None, Query()] = None,
    text: Annotated[Name | None, Query(description="A part of the id.")] = None,
    order: Order = "newest",
    limit: Limit = 100,
    after: After = None,
) -> Page[AdminSession]:
    """Sessions of every tenant that all of these hold for."""
    states = None if state is None else [str(one) for one in state]
    wanted = Filter(states, tenant, node, model, older_than_s, tier, text)
    rows = await search.sessions(db, wanted, order, after, limit + 1)
    data = [_shown(row) for row in rows[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return Page(data=data, has_more=len(rows) > limit, first_id=first, last_id=last)


class Counted(Shape):
    """How many open sessions a filter finds, as POST …/cancel wants them counted. `most`: there are more."""

    object: Literal["session_count"] = "session_count"
    open: int
    most: bool = Field(description="There are more than one request cancels.")


@router.get("/sessions/count")
async def count_sessions(
    db: Db,
    state: Annotated[list[State] | None, Query(description="One or several.")] = None,
    tenant: Annotated[TenantName | None, Query()] = None,
    node: Annotated[Name | None, Query()] = None,
    model: Annotated[Name | None, Query()] = None,
    older_than_s: Annotated[Seconds | None, Query(description="Since they were created.")] = None,
    tier: Annotated[Tier | None, Query()] = None,
    text: Annotated[Name | None, Query(description="A part of the id.")] = None,
) -> Counted:
    """Open sessions of every tenant that all of these hold for: those that one request would cancel."""
    states = None if state is None else [str(one) for one in state]
    found = await search.count_open(db, Filter(states, tenant, node, model, older_than_s, tier, text))
    return Counted(open=found, most=found > MOST)


@router.post("/sessions/cancel", status_code=202, responses=refusals(409))
async def cancel(body: CancelIn, request: Request, db: Db, tenant: Tenant, act: Acting) -> Cancelled:
    """Cancel sessions by id, or all open ones that a filter finds: only if they are as many as expected."""
    before = await recorded(request, db, tenant)
    wanted = before["ids"] if before else await _wanted(db, body)

    async def begin(connection: asyncpg.Connection) -> list[str]:
        """What was begun is known, come what may; a repeat goes on with it."""
        noted, first = await claim(connection, request, tenant, {"id": new_id("cancel"), "ids": wanted})
        if first:
            about = body.model_dump(mode="json", exclude_defaults=True)
            await audit.note(connection, act, None, detail={**about, "sessions": len(wanted)})
        return list(noted["ids"])

    ids = await db.run(begin)
    found = await search.tenants_of(db, ids)
    ending = [name for name, tenant_id in found.items() if await _end(db, tenant_id, name)]
    send(request, _tell(request, ending))
    missing = sorted(set(ids) - set(found))
    return Cancelled(cancelling=len(ending), ended_before=len(found) - len(ending), missing=missing)


async def _wanted(db: Database, body: CancelIn) -> list[str]:
    """Raises Conflict where the filter finds another number of sessions than is expected."""
    if body.filter is None:
        return list(dict.fromkeys(body.ids or []))
    found = await search.open_ones(db, body.filter.as_filter(), MOST + 1)
    if len(found) > MOST:
        raise InvalidRequest(f"the filter finds more than {MOST} open sessions; narrow it down", param="filter")
    if len(found) != body.expect:
        raise Conflict(
            f"the filter finds {len(found)} open sessions, not {body.expect}; look at them, and send that number as"
            " expect",
            param="expect",
            code="count_differs",
        )
    return found


async def _end(db: Database, tenant_id: str, session_id: str) -> bool:
    """False: it had ended."""
    try:
        return await sessions.request_end(db, tenant_id, session_id) not in TERMINAL
    except NotFound:  # its record was removed meanwhile
        return False


async def _tell(request: Request, ids: Sequence[str]) -> None:
    """Their workflows, some at a time. The reconciler tells those that are not reached."""
    temporal = request.app.state.temporal
    for first in range(0, len(ids), AT_ONCE):
        some = ids[first : first + AT_ONCE]
        await asyncio.gather(*(delivery.quietly(delivery.end(temporal, name, "cancelled")) for name in some))


def _shown(row: Mapping[str, Any]) -> AdminSession:
    same = {name: row[name] for name in AdminSession.model_fields if name in row}
    return AdminSession(id=row["session_id"], tenant=row["tenant_id"], node=row["node_id"], **same)
