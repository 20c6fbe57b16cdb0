"""`/v1/sessions`: create, read, post a message, follow, cancel."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import ConfigDict

from runtime import delivery
from runtime.agents import AGENT, parse_agent
from runtime.api import making, views
from runtime.api.documented import After, Id, Limit, Page, refusals
from runtime.api.guard import Db, Tenant, Who
from runtime.api.idempotency import id_for, made_before
from runtime.api.making import checked, resolved
from runtime.api.models import checked_model, ensure_it_fits, ensure_turn_works
from runtime.api.sending import send
from runtime.api.shapes import (
    AttemptOut,
    CheckpointOut,
    DecisionOut,
    EventOut,
    KvOut,
    MessageOut,
    SegmentOut,
    SessionOut,
    SessionRow,
    StepOut,
)
from runtime.api.stream import sse
from runtime.config import MessageIn, SessionConfig, SessionIn
from runtime.errors import InvalidRequest
from runtime.store import events, sessions
from workflows.states import TERMINAL, State

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], responses=refusals(404))

Position = Annotated[int, Query(ge=0, lt=2**63)]
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events as they commit; comments keep the connection.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


class EventIn(MessageIn):
    """The body of POST …/events."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"content": "Which files are there?", "tool_choice": "required", "max_tool_rounds": 1}]
        }
    )

    type: str = "message"


@router.post("", status_code=201, response_model=SessionOut, responses=refusals(409))
async def create(body: SessionIn, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Create a session: its model, system prompt, tools, files and limits. Nothing runs until a message comes."""
    before = await made_before(request, db, tenant)
    if before is not None and await views.exists(db, before):
        return await views.session(db, tenant, before)
    wanted, origin = await resolved(db, tenant, body)
    config = await checked(request, db, tenant, wanted)
    session_id = await id_for(request, db, tenant, "ses")
    seed = body.seed if body.seed is not None else secrets.randbelow(2**63)
    await making.create(request, db, tenant, session_id, config, seed, origin)
    return await views.session(db, tenant, session_id)


@router.get("", response_model=Page[SessionRow])
async def list_sessions(
    db: Db,
    tenant: Tenant,
    limit: Limit = 50,
    after: After = None,
    agent: Annotated[str | None, Query(pattern=AGENT, max_length=80, description="`name`, or `name@3`.")] = None,
    state: Annotated[list[State] | None, Query(max_length=16, description="Any of these.")] = None,
) -> dict[str, Any]:
    """Newest first."""
    name, version = parse_agent(agent) if agent else (None, None)
    states = [str(one) for one in state] if state else None
    return await views.session_list(db, tenant, limit, after, name, version, states)


@router.get("/{session_id}", response_model=SessionOut)
async def get(session_id: Id, db: Db, tenant: Tenant) -> dict[str, Any]:
    """How the session stands."""
    return await views.session(db, tenant, session_id)


@router.post("/{session_id}/events", status_code=202, response_model=MessageOut, responses=refusals(409))
async def post_event(session_id: Id, body: EventIn, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Give the session a message. Once this answers, the message is never lost."""
    if body.type != "message":
        raise InvalidRequest(f"type: {body.type!r} cannot be posted; post a message", param="type")
    row = await views.owned(db, tenant, session_id)
    before = await made_before(request, db, tenant)
    if before is not None and await sessions.message_exists(db, before):
        return {"id": before, "object": "message", "session_id": session_id}
    config = SessionConfig.model_validate(row["config"])
    try:
        body.check_against(config)
    except ValueError as error:
        raise InvalidRequest(f"tool_choice: {error}", param="tool_choice") from error
    served = await checked_model(db, config.model)
    # What the session's policy can make room for is not counted.
    used = await views.token_count(db, session_id) if config.context_policy == "fail" else 0
    await ensure_turn_works(config, served, body)
    await ensure_it_fits(request, db, config, served, content=body.all_text, used=used)
    message_id = await id_for(request, db, tenant, "msg")
    on_busy = body.on_busy or config.on_busy
    await sessions.accept_message(db, tenant, session_id, message_id, body.text, body.kept, on_busy=on_busy)
    interrupt = on_busy == "interrupt"
    send(request, delivery.deliver(request.app.state.temporal, session_id, message_id, interrupt=interrupt))
    return {"id": message_id, "object": "message", "session_id": session_id}


@router.get("/{session_id}/events", response_model=Page[EventOut], response_model_exclude_unset=True)
async def list_events(
    session_id: Id, db: Db, tenant: Tenant, limit: Limit = 100, after: Position = 0
) -> dict[str, Any]:
    """The log, oldest first, from a position on. `after` is the id of the last event that was seen."""
    await views.owned(db, tenant, session_id)
    rows = await events.read(db, session_id, after, limit + 1)
    return views.page(rows, limit)


@router.get("/{session_id}/events/stream", response_class=StreamingResponse, responses=_STREAM)
async def stream(
    session_id: Id,
    request: Request,
    db: Db,
    caller: Who,
    after: Position = 0,
    last_event_id: Annotated[int | None, Header(ge=0, lt=2**63)] = None,
) -> StreamingResponse:
    """Server-sent events from a position on; come back with `Last-Event-ID` and nothing is missed or repeated."""
    row = await views.owned(db, caller.tenant_id, session_id)
    start = min(after if last_event_id is None else last_event_id, row["next_pos"] - 1)
    frames = sse(request.app.state.hub, db, session_id, start, caller.key_id)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(frames, media_type="text/event-stream", headers=headers)


@router.post("/{session_id}/cancel", status_code=202, response_model=SessionOut, responses=refusals(409))
async def cancel(session_id: Id, request: Request, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Stop whatever runs and free everything. The state is `cancelled` only once that is true."""
    if await sessions.request_end(db, tenant, session_id) not in TERMINAL:
        send(request, delivery.end(request.app.state.temporal, session_id, "cancelled"))
    return await views.session(db, tenant, session_id)


@router.get("/{session_id}/steps", response_model=Page[StepOut])
async def list_steps(session_id: Id, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Every step that was begun, in order, those of branches that were left included."""
    await views.owned(db, tenant, session_id)
    return await views.steps(db, session_id)


@router.get("/{session_id}/attempts", response_model=Page[AttemptOut])
async def list_attempts(session_id: Id, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Every try at a step: where it ran, from which token it resumed, and how it ended."""
    await views.owned(db, tenant, session_id)
    return await views.attempts(db, session_id)


@router.get("/{session_id}/checkpoints", response_model=Page[CheckpointOut])
async def list_checkpoints(session_id: Id, db: Db, tenant: Tenant) -> dict[str, Any]:
    """What the session can be resumed, rewound or forked from: one for each step that completed."""
    await views.owned(db, tenant, session_id)
    return await views.checkpoints(db, session_id)


@router.get("/{session_id}/transcript", response_model=Page[SegmentOut])
async def transcript(session_id: Id, db: Db, tenant: Tenant) -> dict[str, Any]:
    """The transcript as token ids, by step: the truth that text is made from. The branch that the session is on."""
    await views.owned(db, tenant, session_id)
    return await views.transcript(db, session_id)


@router.get("/{session_id}/kv", response_model=KvOut)
async def kv(session_id: Id, db: Db, tenant: Tenant) -> dict[str, Any]:
    """Where the session's KV was last seen. A hint: it is verified whenever it is loaded."""
    await views.owned(db, tenant, session_id)
    return await views.kv(db, session_id)


@router.get("/{session_id}/kv/decisions", response_model=Page[DecisionOut])
async def kv_decisions(
    session_id: Id, db: Db, tenant: Tenant, limit: Limit = 100, after: After = None
) -> dict[str, Any]:
    """What was decided about the session's KV, what it was expected to cost, and what it did cost, oldest first."""
    await views.owned(db, tenant, session_id)
    return await views.kv_decisions(db, session_id, limit, after)
