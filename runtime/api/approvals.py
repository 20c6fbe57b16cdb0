"""`/v1/approvals`: what sessions wait for, and the answers. Approvals of calls, outcomes that nobody saw, results of
tools that run at the caller, and budgets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field, model_validator

from runtime import delivery
from runtime.api import views
from runtime.api.guard import Db, Tenant
from runtime.api.sending import send
from runtime.config import Body
from runtime.errors import NotFound
from runtime.store import questions
from runtime.store.budgets import MEASURES

router = APIRouter(prefix="/v1/approvals", tags=["approvals"])

Limit = Annotated[int, Query(ge=1, le=1000)]


class AnswerIn(Body):
    """The body of POST /v1/approvals/{id}.

    approval: `approve` or `decline` (with a `reason`, which the model is told). outcome: `ran` (with the `output`, if
    it is known), `did_not_run` (it runs now) or `decline`. client_tool: `result` with `output`, and `is_error` where it
    failed. budget: `raise` with the new limits in `budget`, or `stop`, which ends the turn.
    """

    decision: Literal["approve", "decline", "ran", "did_not_run", "result", "raise", "stop"]
    reason: str | None = Field(default=None, max_length=2000)
    output: str | None = Field(default=None, max_length=1_000_000)
    is_error: bool = False
    budget: dict[Literal["tokens", "steps", "wall_s", "tool_s"], Annotated[float, Field(gt=0, lt=2**53)] | None] = (
        Field(default_factory=dict)
    )

    @model_validator(mode="after")
    def _belongs_to_the_decision(self) -> AnswerIn:
        if (self.decision == "raise") != bool(self.budget):
            raise ValueError(f"budget: give new limits ({', '.join(MEASURES)}) with the decision raise, and only then")
        if self.decision == "result" and self.output is None:
            raise ValueError("output: a result needs one; an empty string will do")
        return self


@router.get("")
async def list_approvals(
    db: Db,
    tenant: Tenant,
    limit: Limit = 100,
    state: Literal["open", "answered", "expired", "void"] | None = "open",
    session: str | None = None,
    after: str | None = None,
) -> dict[str, Any]:
    """Oldest first: open ones by default."""
    return await views.questions(db, tenant, limit, state, session, after)


@router.get("/{question_id}")
async def get(question_id: str, db: Db, tenant: Tenant) -> dict[str, Any]:
    found = await views.question(db, tenant, question_id)
    if found is None:
        raise NotFound(f"there is no question {question_id}")
    return found


@router.post("/{question_id}")
async def answer(question_id: str, body: AnswerIn, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Answer once; the same answer again is a no-op, another one is refused."""
    command_id = await questions.answer(db, tenant, question_id, body.model_dump(exclude_defaults=True))
    found = await get(question_id, db, tenant)
    if command_id is not None:
        send(request, delivery.command(request.app.state.temporal, found["session_id"], command_id, "answer"))
    return found
