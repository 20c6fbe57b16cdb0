"""`/v1/approvals`: what sessions wait for, and the answers. Approvals of calls, outcomes that nobody saw, results of
tools that run at the caller, and budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from pydantic import ConfigDict, Field, model_validator

from runtime import delivery
from runtime.api import views
from runtime.api.documented import After, Id, Limit, Page, refusals
from runtime.api.guard import Db, Tenant
from runtime.api.sending import send
from runtime.api.shapes import QuestionOut
from runtime.config import Body, BudgetLimits
from runtime.errors import NotFound
from runtime.store import questions
from runtime.store.budgets import MEASURES

router = APIRouter(prefix="/v1/approvals", tags=["approvals"], responses=refusals(404))


# What comes with a decision.
_TAKES: Final[Mapping[str, tuple[str, ...]]] = {
    "approve": (),
    "decline": ("reason",),
    "ran": ("output",),
    "did_not_run": ("reason",),
    "result": ("output", "is_error"),
    "raise": ("budget",),
    "stop": ("reason",),
}


class AnswerIn(Body):
    """The body of POST /v1/approvals/{id}.

    approval: `approve` or `decline` (with a `reason`, which the model is told). outcome: `ran` (with the `output`, if
    it is known), `did_not_run` (it runs now) or `decline`. client_tool: `result` with `output`, and `is_error` where it
    failed. budget: `raise` with the new limits in `budget`, or `stop`, which ends the turn.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"decision": "approve"},
                {"decision": "decline", "reason": "Not on a Friday."},
                {"decision": "result", "output": "Sunny, 21 degrees."},
                {"decision": "raise", "budget": {"tokens": 200_000}},
            ]
        }
    )

    decision: Literal["approve", "decline", "ran", "did_not_run", "result", "raise", "stop"]
    reason: str | None = Field(default=None, max_length=2000)
    output: str | None = Field(default=None, max_length=1_000_000)
    is_error: bool = False
    budget: BudgetLimits = BudgetLimits()

    @model_validator(mode="after")
    def _belongs_to_the_decision(self) -> AnswerIn:
        if self.decision == "raise" and not self.budget.model_fields_set:
            raise ValueError(f"budget: give new limits ({', '.join(MEASURES)}) with the decision raise")
        said = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        for field in sorted(said - {"decision", *_TAKES[self.decision]}):
            takes = " and ".join(_TAKES[self.decision]) or "nothing"
            raise ValueError(f"{field}: does not belong to {self.decision}, which takes {takes}")
        if self.decision == "result" and self.output is None:
            raise ValueError("output: a result needs one; an empty string will do")
        return self

    def given(self) -> dict[str, Any]:
        """What was said, and nothing else. A limit of null is said too."""
        said = self.model_dump(exclude_defaults=True, exclude={"budget"})
        return said | ({"budget": self.budget.model_dump(exclude_unset=True)} if self.decision == "raise" else {})


@router.get("", response_model=Page[QuestionOut])
async def list_approvals(
    db: Db,
    tenant: Tenant,
    limit: Limit = 100,
    state: Literal["open", "answered", "expired", "void"] | None = "open",
    session: Annotated[str | None, Query(min_length=1, max_length=200)] = None,
    after: After = None,
) -> dict[str, Any]:
    """Oldest first: open ones by default."""
    return await views.questions(db, tenant, limit, state, session, after)


@router.get("/{question_id}", response_model=QuestionOut)
async def get(question_id: Id, db: Db, tenant: Tenant) -> dict[str, Any]:
    """One question, answered or not."""
    found = await views.question(db, tenant, question_id)
    if found is None:
        raise NotFound(f"there is no question {question_id}")
    return found


@router.post("/{question_id}", response_model=QuestionOut, responses=refusals(409))
async def answer(question_id: Id, body: AnswerIn, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Answer once; the same answer again is a no-op, another one is refused."""
    command_id = await questions.answer(db, tenant, question_id, body.given())
    found = await get(question_id, db, tenant)
    if command_id is not None:
        send(request, delivery.command(request.app.state.temporal, found["session_id"], command_id, "answer"))
    return found
