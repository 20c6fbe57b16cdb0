"""`/v1/chat/completions`: the whole conversation comes each time, and finds the session that has had most of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict

from runtime.api import following, turns
from runtime.api.documented import refusals
from runtime.api.guard import Db, Tenant
from runtime.api.problems import problem
from runtime.api.responses import _SSE, _STREAM, _hash, made
from runtime.api.turns import KEPT_S, Asked
from runtime.openai import ChatIn, Chatting, Tools, completion
from runtime.openai.chatting import usage
from runtime.openai.requests import choice_of, form_of
from runtime.store import responses
from runtime.store.responses import Row

router = APIRouter(prefix="/v1/chat/completions", tags=["chat"])


class CompletionOut(BaseModel):
    """A chat completion, with the members that OpenAI's have."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["chat.completion"]
    choices: list[dict[str, Any]]


@router.post("", response_model=CompletionOut, responses={**_STREAM, **refusals(404, 409)})
async def create(body: ChatIn, request: Request, db: Db, tenant: Tenant) -> Response:
    """What comes next in a conversation. What was said before finds its KV again, and says so in `cached_tokens`."""
    count = body.n or 1
    asked = _asked(body, await _hash(request, tenant) if count == 1 else None)
    rows = [await made(request, db, tenant, asked)]
    for index in range(1, count):
        turn = {**asked.turn, **({"seed": (asked.turn["seed"] + index) % 2**63} if "seed" in asked.turn else {})}
        own_id = f"{rows[0].response_id}_{index}"
        row = await responses.find(db, tenant, own_id)  # where the first was made before, this one may have been
        more = dataclasses.replace(asked, turn=turn, response_id=own_id)
        rows.append(row or await turns.accept(request, db, tenant, more, fork=True))
    head = {
        "id": f"chatcmpl-{rows[0].response_id.removeprefix('resp_')}",
        "created": int(time.time()),
        "model": rows[0].base["model"],
        "system_fingerprint": None,
    }
    if body.stream:
        frames = _sse(request.app, rows, head, body.with_usage)
        return StreamingResponse(frames, media_type="text/event-stream", headers=_SSE)
    whole = await asyncio.gather(*(following.whole(request.app, row) for row in rows))
    if failed := next((one for one in whole if one["status"] == "failed"), None):
        return _failed(failed)
    return JSONResponse(completion(head, whole, bool(body.logprobs)))


def _failed(response: Mapping[str, Any]) -> Response:
    answer = problem(500, response["error"]["code"], response["error"]["message"])
    answer.headers["x-should-retry"] = "false"
    return answer


def _asked(body: ChatIn, request_hash: str | None) -> Asked:
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    more: dict[str, Any] = {"stop": body.stops} if body.stops else {}
    if body.logit_bias:
        more["logit_bias"] = body.logit_bias
    form = form_of(body.response_format, "response_format")
    return Asked(
        base={"object": "chat.completion", "created_at": int(time.time()), "error": None, "incomplete_details": None},
        model=body.model or "",
        instructions=None,
        items=body.items(),
        tools=Tools.of(body.tools),
        tool_choice=choice_of(body.tool_choice),
        turn=body.turn(logprobs, form, body.most_tokens, **more),
        drops_output=False,
        stored=False,
        keep_s=KEPT_S["24h"] if body.prompt_cache_retention == "24h" else KEPT_S["in_memory"],
        logprobs=bool(body.logprobs),
        request_hash=request_hash,
    )


async def _sse(app: FastAPI, rows: Sequence[Row], head: Mapping[str, Any], with_usage: bool) -> AsyncIterator[bytes]:
    ready: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=64)
    counted: list[dict[str, Any]] = []

    async def one(index: int, row: Row) -> None:
        chatting = Chatting(head, index)
        try:
            async for told in following.tell(app, row):
                if told is None:
                    await ready.put(b": keep-alive\n")
                    continue
                if told["type"] == "response.failed":
                    error = {**told["response"]["error"], "type": "server_error", "param": None}
                    await ready.put(_frame({"error": error}))
                for chunk in chatting.chunks([told]):
                    await ready.put(_frame({**chunk, **({"usage": None} if with_usage else {})}))
                if told["type"] in ("response.completed", "response.incomplete"):
                    counted.append(usage(told["response"]))
        finally:
            await ready.put(None)

    tasks = [asyncio.create_task(one(index, row)) for index, row in enumerate(rows)]
    try:
        left = len(tasks)
        while left:
            frame = await ready.get()
            if frame is None:
                left -= 1
            else:
                yield frame
        await asyncio.gather(*tasks)
        if with_usage and counted:
            output = sum(each["completion_tokens"] for each in counted)
            total = {**counted[0], "completion_tokens": output, "total_tokens": counted[0]["prompt_tokens"] + output}
            yield _frame({**head, "object": "chat.completion.chunk", "choices": [], "usage": total})
        yield b"data: [DONE]\n\n"
    finally:
        for task in tasks:
            task.cancel()


def _frame(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
