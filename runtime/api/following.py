"""What turns tell, from their sessions' committed events; and who sees them to their ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi import FastAPI

from engine.tokens import FORMATS
from runtime import delivery
from runtime.api import views
from runtime.errors import Conflict, NotFound
from runtime.openai import Chain, Telling
from runtime.openai.requests import AGENT_MODEL
from runtime.openai.telling import ENDED
from runtime.store import Database, events, responses, sessions
from runtime.store.responses import Row

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 15.0
SWEEP_EVERY_S: Final = 30.0
STALE_S: Final = 20.0  # for as long a response may be on its way into its session
_PAGE = 500


async def tell(app: FastAPI, row: Row, starting_after: int = -1) -> AsyncIterator[dict[str, Any] | None]:
    """Events of the response's stream after a sequence number; None where there was none for a while."""
    db: Database = app.state.db
    telling = await _telling(app, row)
    for told in telling.begin():
        if told["sequence_number"] > starting_after:
            yield told
    with app.state.hub.following(row.session_id) as (_, reader):
        after = row.from_pos
        while not telling.done:
            reader.woken.clear()
            page = await events.read(db, row.session_id, after, _PAGE)
            for event in page:
                after = event["id"]
                for told in telling.feed(await _with_tokens(app, row, event)):
                    if told["sequence_number"] > starting_after:
                        yield told
                if telling.done:
                    break
            if not page:
                if await views.exists(db, row.session_id) is False:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.woken.wait(), HEARTBEAT_S)
                    continue
                yield None
    await _finish(db, row, telling)


async def whole(app: FastAPI, row: Row) -> dict[str, Any]:
    """The response once it has ended: its stream's last word."""
    last: dict[str, Any] | None = None
    async for event in tell(app, row):
        last = event or last
    if last is not None and last.get("response", {}).get("status") in ENDED:
        return dict(last["response"])
    return await now(app, row)  # its record is gone


async def now(app: FastAPI, row: Row) -> dict[str, Any]:
    """The response as it stands."""
    if row.response is not None:
        return row.response
    telling = await _told(app, row)
    if telling.done:
        await _finish(app.state.db, row, telling)
    elif row.base.get("background") and telling.last_position <= row.from_pos + 1:
        return {**telling.response(), "status": "queued"}
    return telling.response()


async def _told(app: FastAPI, row: Row) -> Telling:
    """Everything that there is to tell by now."""
    db: Database = app.state.db
    telling, after = await _telling(app, row), row.from_pos
    telling.begin()
    while page := await events.read(db, row.session_id, after, _PAGE):
        for event in page:
            after = event["id"]
            telling.feed(await _with_tokens(app, row, event))
            if telling.done:
                return telling
    return telling


async def _telling(app: FastAPI, row: Row) -> Telling:
    calls = FORMATS[0]
    if row.base["_chat"] is not None:
        calls = (await app.state.chats.of(app.state.db, row.base["_chat"])).calls
    functions = [tool["name"] for tool in row.root["tools"] if isinstance(tool, dict) and tool.get("type") == "client"]
    functions += row.base.get("_functions", ())  # of an agent
    return Telling(
        dict(row.base),
        row.session_id,
        calls,
        functions,
        row.message_id,
        has_tools=bool(row.root["tools"]) or row.root["model"].startswith(AGENT_MODEL),
        asks=row.base.get("_asks", ()),
        held={int(number): about for number, about in row.base.get("_held", {}).items()},
        held_step=row.base.get("_held_step") or 0,
    )


async def _with_tokens(app: FastAPI, row: Row, event: dict[str, Any]) -> dict[str, Any]:
    """With the texts of the tokens whose likelihood is told."""
    if event["type"] != "model.delta" or not event["data"].get("logprobs") or not row.base["_logprobs"]:
        return event
    tokenizer = await app.state.chats.tokenizer(app.state.db, row.base["_chat"])
    data, named = event["data"], []
    for token, one in zip(data["token_ids"], data["logprobs"], strict=True):
        text = tokenizer.decode([token])
        if text:
            top = [{**each, "token": tokenizer.decode([each["token_id"]])} for each in one["top"]]
            named.append({**one, "token": text, "top": top})
    return {**event, "data": {**data, "logprobs": named}}


async def _finish(db: Database, row: Row, telling: Telling) -> None:
    if not telling.done or row.response is not None:
        return
    digest = Chain.of(row.root, [*await responses.history(db, row), *telling.kept]).last  # it has kept nothing yet
    response = {**telling.response(), "completed_at": int(time.time())}
    await responses.finish(
        db,
        row,
        end_pos=telling.last_position,
        end_step=telling.last_step or None,
        kept=telling.kept,
        response=response,
        digest=digest,
    )


def follow(app: FastAPI, row: Row) -> None:
    """See it to its end, whether or not somebody listens."""

    async def to_its_end() -> None:
        try:
            async for _ in tell(app, row):
                pass
        except Exception as error:
            log.warning("response %s is not followed any longer: %s", row.response_id, error)

    app.state.followed.add(row.response_id)
    task = asyncio.create_task(to_its_end())
    app.state.sending.add(task)
    task.add_done_callback(app.state.sending.discard)
    task.add_done_callback(lambda _: app.state.followed.discard(row.response_id))


async def tend(app: FastAPI) -> None:
    """For as long as the process lives: see responses to their ends whose process is gone, and end sessions that no
    response needs any longer."""
    db: Database = app.state.db
    while True:
        try:
            for row in await responses.unfinished(db, STALE_S):
                if row.response_id not in app.state.followed:
                    await take_over(app, db, row)
            for tenant, session_id in await responses.expired_sessions(db):
                await end_session(app, tenant, session_id)
        except Exception as error:
            log.warning("responses are not tended: %s", error)
        await asyncio.sleep(SWEEP_EVERY_S)


async def take_over(app: FastAPI, db: Database, row: Row) -> None:
    """Of another process, or an earlier one: its client may not have been told that it was accepted."""
    told = row.message_id is None or await sessions.message_exists(db, row.message_id)
    if told and (row.message_id is not None or await responses.was_answered(db, row)):
        follow(app, row)
    else:
        await responses.forget(db, row.response_id, row.session_id)


async def ended(app: FastAPI, row: Row) -> Row:
    """The same, with its end where it has ended."""
    if row.response is not None:
        return row
    db: Database = app.state.db
    telling = await _told(app, row)
    if telling.done:
        await _finish(db, row, telling)
    return await responses.find(db, row.tenant_id, row.response_id) or row


async def end_session(app: FastAPI, tenant: str, session_id: str) -> None:
    with contextlib.suppress(NotFound, Conflict):
        await sessions.request_end(app.state.db, tenant, session_id)
        await delivery.quietly(delivery.end(app.state.temporal, session_id, "cancelled"))
