"""`/v1/admin/attention` and `/v1/admin/approvals`: what needs a person now, of every tenant."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field
from temporalio.service import RPCError

from runtime.api.documented import After, Limit, Page, Shape, page_of
from runtime.api.guard import Db, admin
from runtime.api.shapes import QuestionOut
from runtime.api.tenants import TenantName
from runtime.api.views import as_question
from runtime.store import attention, fleet

router = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Depends(admin)])

QUIET_S = 300.0
ASK_TEMPORAL_S = 2.0
# What Temporal's server says of a workflow whose tasks fail one after the other.
_FAILING = "ExecutionStatus = 'Running' AND TemporalReportedProblems IS NOT NULL"


class Concern(Shape):
    """A session that somebody should look at, and why."""

    session_id: str
    tenant: str
    state: str
    node: str | None
    since: datetime.datetime = Field(description="When it was last heard of.")
    about: str | None


class Latency(Shape):
    """Seconds that the newest steps of a kind took, waits inside them included."""

    kind: str
    steps: int
    p50: float
    p95: float
    p99: float


class Away(Shape):
    """A node that does not beat, and the open sessions that it had."""

    node: str
    heartbeat_age_s: float
    sessions: int


class Denial(Shape):
    """What a session's sandbox wanted to reach and may not."""

    session_id: str
    tenant: str
    at: datetime.datetime
    host: str
    port: int | None
    reason: str
    times: int


class Attention(Shape):
    """What needs a person. At most twenty sessions of each kind are named; `questions` are counted by kind.

    stuck: should be doing something, and nothing was heard of them for five minutes. failed: wait to be retried or
    ended. retrying: their step was begun three times or more. workflow_tasks_failing: workflows that Temporal cannot
    get on with; null where Temporal did not say, and `temporal` says why.
    """

    object: Literal["attention"] = "attention"
    questions: dict[str, int]
    stuck: list[Concern]
    failed: list[Concern]
    retrying: list[Concern]
    nodes_away: list[Away]
    egress_denied: list[Denial] = Field(description="The latest.")
    workflow_tasks_failing: int | None
    temporal: str
    latency: list[Latency]


class OpenQuestion(QuestionOut):
    """What a session of any tenant waits for."""

    tenant: str


@router.get("/attention")
async def needs_attention(request: Request, db: Db) -> Attention:
    """What an operator who is paged should look at first."""
    stuck, failed, retrying, latencies = await asyncio.gather(
        attention.stuck(db, QUIET_S), attention.failed(db), attention.retrying(db), attention.latencies(db)
    )
    asked, nodes, denied, (failing, temporal) = await asyncio.gather(
        attention.asked(db), fleet.nodes(db), attention.denied(db), _failing(request)
    )
    return Attention(
        questions=asked,
        stuck=_concerns(stuck),
        failed=_concerns(failed),
        retrying=_concerns(retrying),
        nodes_away=[
            Away(node=row["node_id"], heartbeat_age_s=row["age_s"], sessions=row["sessions"])
            for row in nodes
            if not row["alive"] and row["sessions"]
        ],
        egress_denied=[
            Denial(session_id=row["session_id"], tenant=row["tenant_id"], at=row["created_at"], **row["data"])
            for row in denied
        ],
        workflow_tasks_failing=failing,
        temporal=temporal,
        latency=[Latency(**row) for row in latencies],
    )


@router.get("/approvals")
async def list_approvals(
    db: Db,
    kind: Literal["approval", "outcome", "client_tool", "budget"] | None = None,
    tenant: Annotated[TenantName | None, Query()] = None,
    limit: Limit = 100,
    after: After = None,
) -> Page[OpenQuestion]:
    """Open questions of every tenant, oldest first. Answer with POST /v1/admin/tenants/{tenant}/approvals/{id}."""
    rows = await attention.open_questions(db, kind, tenant, after, limit + 1)
    return page_of(
        [OpenQuestion(tenant=row["tenant_id"], **as_question(row)) for row in rows[:limit]], len(rows) > limit
    )


def _concerns(rows: Iterable[Mapping[str, Any]]) -> list[Concern]:
    return [
        Concern(
            session_id=row["session_id"],
            tenant=row["tenant_id"],
            state=row["state"],
            node=row["node_id"],
            since=row["updated_at"],
            about=row["about"],
        )
        for row in rows
    ]


async def _failing(request: Request) -> tuple[int | None, str]:
    """Workflows whose tasks fail again and again, and what Temporal said of itself."""
    try:
        async with asyncio.timeout(ASK_TEMPORAL_S):
            found = await request.app.state.temporal.count_workflows(_FAILING)
    except TimeoutError:
        return None, f"did not answer within {ASK_TEMPORAL_S:.0f} s"
    except RPCError as error:
        return None, str(error)
    return found.count, "ok"
