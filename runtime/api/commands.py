"""`/v1/sessions/{id}/…`: pause, resume, retry, interrupt, rewind, fork, complete."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field

from runtime import delivery
from runtime.api import views
from runtime.api.documented import Id, refusals
from runtime.api.guard import Db, Tenant
from runtime.api.idempotency import id_for, made_before
from runtime.api.sending import send
from runtime.api.shapes import CommandOut, SessionOut
from runtime.config import Body
from runtime.store import branches, commands, sessions
from workflows.states import TERMINAL

router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["sessions"], responses=refusals(404, 409))


class RewindIn(Body):
    """The body of POST …/rewind. A `seed` makes what is sampled from there on differ from what was; with `resume`
    the session goes on at once where the checkpoint has work left, instead of pausing there."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"step": 4}, {"step": 4, "seed": 7, "resume": True}]})

    step: int = Field(ge=1, lt=2**31)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    resume: bool = False


class ForkIn(Body):
    """The body of POST …/fork: from which checkpoint (the last one by default), and a seed of its own if wanted."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"step": 4, "seed": 7, "resume": True}]})

    step: int | None = Field(default=None, ge=1, lt=2**31)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    resume: bool = False


@router.post("/pause", status_code=202, response_model=CommandOut)
async def pause(session_id: Id, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Stop spending: a think stops at its last durable token, a tool runs to its end. Idempotent."""
    return await _ask(request, db, tenant, session_id, "pause", {})


@router.post("/resume", status_code=202, response_model=CommandOut)
async def resume(session_id: Id, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Go on where the session was paused."""
    return await _ask(request, db, tenant, session_id, "resume", {})


@router.post("/retry", status_code=202, response_model=CommandOut)
async def retry(session_id: Id, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Go on at the step that failed, and at no earlier one."""
    return await _ask(request, db, tenant, session_id, "retry", {})


@router.post("/interrupt", status_code=202, response_model=CommandOut)
async def interrupt(session_id: Id, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """End the turn: what was sampled stays, calls that run are stopped and told as interrupted, the session rests."""
    return await _ask(request, db, tenant, session_id, "interrupt", {})


@router.post("/rewind", status_code=202, response_model=CommandOut)
async def rewind(session_id: Id, body: RewindIn, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Go back to a checkpoint: transcript, workspace and pages. What came after stays in the record."""
    return await _ask(request, db, tenant, session_id, "rewind", body.model_dump())


@router.post("/fork", status_code=201, response_model=SessionOut)
async def fork(session_id: Id, body: ForkIn, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """A new session that begins as this one was at a checkpoint. Pages and files are shared, not copied."""
    await views.owned(db, tenant, session_id)
    child_id = await made_before(request, db, tenant) or await id_for(request, db, tenant, "ses")
    await branches.fork(db, tenant, session_id, child_id, body.step, body.seed)
    child = await views.session(db, tenant, child_id)
    if body.resume and child["state"] == "paused":
        command_id = f"cmd_{child_id}"
        await commands.accept(db, tenant, child_id, command_id, "resume", {})
        send(request, delivery.command(request.app.state.temporal, child_id, command_id, "resume"))
    return child


@router.post("/complete", status_code=202, response_model=SessionOut)
async def complete(session_id: Id, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """End a session that rests: everything that it holds is freed, its record stays readable. Idempotent."""
    if await sessions.request_end(db, tenant, session_id, "completed") not in TERMINAL:
        send(request, delivery.end(request.app.state.temporal, session_id, "completed"))
    return await views.session(db, tenant, session_id)


async def _ask(
    request: Request, db: Db, tenant: Tenant, session_id: Id, verb: str, argument: dict[str, Any]
) -> dict[str, Any]:
    await views.owned(db, tenant, session_id)
    command_id = await made_before(request, db, tenant)
    if command_id is None or not await commands.exists(db, command_id):
        command_id = await id_for(request, db, tenant, "cmd")
        await commands.accept(db, tenant, session_id, command_id, verb, argument)
    session = await views.session(db, tenant, session_id)
    if session["state"] not in TERMINAL:
        send(request, delivery.command(request.app.state.temporal, session_id, command_id, verb))
    return {**session, "command": command_id}
