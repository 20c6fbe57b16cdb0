"""`/v1/responses`, as OpenAI's clients know it. Behind each stands a session."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict

from runtime import delivery
from runtime.api import following, turns
from runtime.api.documented import Id, refusals
from runtime.api.guard import Db, Tenant
from runtime.api.idempotency import id_for, made_before
from runtime.api.sending import send
from runtime.api.turns import KEPT_S, Asked
from runtime.errors import InvalidRequest
from runtime.openai import ResponseIn, Tools, input_items, listed
from runtime.openai.requests import choice_of
from runtime.store import Database, commands, responses
from runtime.store.responses import Row

router = APIRouter(prefix="/v1/responses", tags=["responses"])

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "description": "The response, or its stream.",
    }
}
_SSE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class ResponseOut(BaseModel):
    """A response, with the members that OpenAI's have; `runtime.session` names the session behind it."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    status: Literal["queued", "in_progress", "completed", "failed", "incomplete", "cancelled"]


class ItemList(BaseModel):
    """Items, oldest first or newest first."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Deleted(BaseModel):
    """What was deleted."""

    id: str
    object: str
    deleted: bool = True


Order = Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")]
Few = Annotated[int, Query(ge=1, le=100, description="At most so many.")]
AfterItem = Annotated[str | None, Query(max_length=200, description="The id of an item: those after it.")]


@router.post("", response_model=ResponseOut, responses={**_STREAM, **refusals(404, 409)})
async def create(body: ResponseIn, request: Request, db: Db, tenant: Tenant) -> Response:
    """A turn: what is said, and what the model and its tools make of it. A response goes on without its connection."""
    row = await made(request, db, tenant, _asked(body, await _hash(request, tenant)))
    if body.stream:
        return StreamingResponse(_sse(request.app, row), media_type="text/event-stream", headers=_SSE)
    answer = await (following.now if body.background else following.whole)(request.app, row)
    return JSONResponse(answer)


@router.get("/{response_id}", response_model=ResponseOut, responses={**_STREAM, **refusals(404)})
async def get(
    response_id: Id,
    request: Request,
    db: Db,
    tenant: Tenant,
    stream: Annotated[bool, Query(description="Its stream, from the beginning or after an event.")] = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=2**31, description="The sequence_number last seen.")] = None,
    include: Annotated[list[str] | None, Query(max_length=32, description="A hint; what there is is shown.")] = None,
    include_obfuscation: Annotated[bool, Query(description="A hint; nothing is padded here.")] = False,
) -> Response:
    """A response that was stored, as it stands; or its stream again, which is the same whenever it is read."""
    row = await responses.get(db, tenant, response_id)
    if stream:
        frames = _sse(request.app, row, -1 if starting_after is None else starting_after)
        return StreamingResponse(frames, media_type="text/event-stream", headers=_SSE)
    return JSONResponse(await following.now(request.app, row))


@router.delete("/{response_id}", response_model=Deleted, responses=refusals(404))
async def delete(response_id: Id, db: Db, tenant: Tenant) -> dict[str, Any]:
    """It cannot be retrieved any more. What went on from it stays."""
    await responses.get(db, tenant, response_id)
    await responses.remove(db, tenant, response_id)
    return {"id": response_id, "object": "response"}


@router.post("/{response_id}/cancel", response_model=ResponseOut, responses=refusals(404, 409))
async def cancel(response_id: Id, request: Request, db: Db, tenant: Tenant) -> Response:
    """Stop one that runs in the background; what it has said stays. Idempotent."""
    row = await responses.get(db, tenant, response_id)
    if not row.base.get("background"):
        raise InvalidRequest("Only responses created with background=true can be cancelled.", code="not_background")
    if row.response is None:
        command_id = f"cmd_{response_id.removeprefix('resp_')}"
        await commands.accept(db, tenant, row.session_id, command_id, "interrupt", {})
        send(request, delivery.command(request.app.state.temporal, row.session_id, command_id, "interrupt"))
        return JSONResponse(await following.whole(request.app, row))
    return JSONResponse(row.response)


@router.get("/{response_id}/input_items", response_model=ItemList, responses=refusals(404))
async def input_items_of(
    response_id: Id, db: Db, tenant: Tenant, limit: Few = 20, order: Order = "desc", after: AfterItem = None
) -> dict[str, Any]:
    """What it was made from, what came before it included."""
    row = await responses.get(db, tenant, response_id)
    parent = await responses.find(db, tenant, row.parent_id) if row.parent_id else None
    items = [*(await responses.history(db, parent) if parent is not None else []), *row.input]
    return page_of(listed(items, response_id.replace("resp", "item")), limit, order, after)


def page_of(items: list[dict[str, Any]], limit: int, order: str, after: str | None) -> dict[str, Any]:
    items = items[::-1] if order == "desc" else items
    at = next((index + 1 for index, item in enumerate(items) if item["id"] == after), 0) if after else 0
    data = items[at : at + limit]
    more = len(items) > at + limit
    ids = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "has_more": more, "first_id": ids[0], "last_id": ids[1]}


def _asked(body: ResponseIn, request_hash: str | None) -> Asked:
    tools = Tools.of(body.tools)
    logprobs = body.top_logprobs
    if logprobs is None and "message.output_text.logprobs" in (body.include or ()):
        logprobs = 0
    turn = body.turn(logprobs, body.form, body.max_output_tokens)
    stored = body.store is not False
    keep = (
        KEPT_S[body.prompt_cache_retention] if body.prompt_cache_retention else KEPT_S["24h" if stored else "in_memory"]
    )
    return Asked(
        base=_base(body, tools, stored),
        model=body.model or "",
        instructions=body.instructions,
        items=input_items(body.input),
        tools=tools,
        tool_choice=choice_of(body.tool_choice),
        turn=turn,
        drops_output=body.truncation == "auto",
        stored=stored,
        keep_s=keep,
        most_calls=body.max_tool_calls,
        previous=body.previous_response_id,
        conversation=body.conversation_id,
        logprobs=logprobs is not None,
        request_hash=request_hash,
    )


def _base(body: ResponseIn, tools: Tools, stored: bool) -> dict[str, Any]:
    shown = body.text or {}
    choice = body.tool_choice or "auto"
    return {
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "incomplete_details": None,
        "error": None,
        "previous_response_id": body.previous_response_id,
        **({"conversation": {"id": body.conversation_id}} if body.conversation_id else {}),
        "instructions": body.instructions,
        "tools": list(tools.shown),
        "tool_choice": choice,
        "truncation": body.truncation or "disabled",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {**shown, "format": _format(shown.get("format"))},
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "top_logprobs": body.top_logprobs or 0,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "store": stored,
        "background": bool(body.background),
        "service_tier": "default",
        "metadata": body.metadata or {},
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


def _format(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given if isinstance(given, dict) else {"type": "text"}
    return {"name": "answer", "description": None, "strict": True, **given}


async def _hash(request: Request, tenant: str) -> str:
    """Of who asks for what."""
    authorization = request.headers.get("authorization", "")
    about = f"{tenant}\n{authorization}\n{request.url.path}\n"
    return hashlib.sha256(about.encode() + await request.body()).hexdigest()


async def made(request: Request, db: Database, tenant: str, asked: Asked) -> Row:
    """The response that the request makes, or made before. Raises Conflict where its Idempotency-Key was another's."""
    if "idempotency-key" in request.headers:
        before = await made_before(request, db, tenant)
        if before is not None and (row := await responses.find(db, tenant, before)) is not None:
            return row
        response_id = await id_for(request, db, tenant, "resp")
        return await turns.accept(request, db, tenant, replace(asked, response_id=response_id))
    return await _claimed(request, db, tenant, asked) or await turns.accept(request, db, tenant, asked)


async def _claimed(request: Request, db: Database, tenant: str, asked: Asked) -> Row | None:
    """What an earlier try of the same request made. Clients number their tries, and send nothing else along."""
    number = request.headers.get("x-stainless-retry-count", "")
    count = int(number) if number.isascii() and number.isdigit() and len(number) < 4 else 0
    if not 1 <= count <= 100 or asked.request_hash is None:
        return None
    return await responses.claimed(db, tenant, asked.request_hash, count)


async def _sse(app: FastAPI, row: Row, starting_after: int = -1) -> AsyncIterator[bytes]:
    """No ids, and heartbeats of one line: that is what both official clients bear."""
    async for told in following.tell(app, row, starting_after):
        if told is None:
            yield b": keep-alive\n"
            continue
        yield f"event: {told['type']}\ndata: {json.dumps(told, separators=(',', ':'))}\n\n".encode()
    yield b"data: [DONE]\n\n"
