"""Turns: what OpenAI's clients ask for, as messages to sessions. What sessions tell of them is in `following.py`.

A conversation that goes on finds its session again, and with it its KV and its workspace: by the response that it
names, by its conversation, or by what it says (`Chain`). It goes on in the session where that rests at this point, in a
fork where it has gone on otherwise; where instructions or tools are others, in a new session that is told what was
said.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import asyncpg
from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError

from runtime import delivery
from runtime.agents import AGENT, Origin
from runtime.api import following, making, views
from runtime.api.making import checked, resolved
from runtime.api.models import checked_model, ensure_it_fits, ensure_turn_works
from runtime.api.problems import describe
from runtime.api.sending import send
from runtime.config import MessageIn, SessionConfig, SessionIn, Wanted
from runtime.errors import Conflict, InvalidRequest, RequestError
from runtime.openai import Chain, Items, Tools, as_engine
from runtime.openai.items import UNREAD, opening
from runtime.openai.requests import AGENT_MODEL
from runtime.store import Database, branches, questions, responses, sessions
from runtime.store.responses import Row
from runtime.tools.kinds import ClientTool
from workflows.states import TERMINAL, State

KEPT_S: Final[Mapping[str, float]] = {"24h": 86_400.0, "in_memory": 3600.0, "in-memory": 3600.0}
_ROUNDS = 1000
_THEIR_WORDS: Final = {"options.sampling.": "", "options.": "", "items.": "input.", ".client.": ".", ".mcp.": "."}
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Asked:
    """What a request asks for, in one face's words or the other's.

    base: the response as it is shown while it goes on, without id, status and output
    items: what was given; of a whole conversation, all of it
    turn: `TurnOptions`; most_calls: rounds of tools that run inside
    keep_s: seconds for which the session waits for what follows
    """

    base: Mapping[str, Any]
    model: str
    instructions: str | None
    items: Items
    tools: Tools
    tool_choice: str
    turn: Mapping[str, Any]
    drops_output: bool
    stored: bool
    keep_s: float
    most_calls: int | None = None
    previous: str | None = None
    conversation: str | None = None
    logprobs: bool = False
    request_hash: str | None = None
    response_id: str | None = None  # that its Idempotency-Key stands for


@dataclass(frozen=True)
class _Place:
    """Where a turn begins. `items`: what its session has not been told; `answers`: to the questions that it waits for.

    held: calls of the parent's last message that waited for approval, or with those that did, by number
    made: whether the session is this turn's own: a fork, or with `config` one that is yet to be made
    """

    session_id: str
    parent: Row | None
    items: Items
    answers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    held: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    made: bool = False
    config: SessionConfig | None = None
    origin: Origin = field(default_factory=Origin)

    @property
    def goes_on(self) -> bool:
        """Whether the turn needs no message: it is what follows the answers."""
        return bool(self.answers or self.held)


async def accept(request: Request, db: Database, tenant: str, asked: Asked, *, fork: bool = False) -> Row:
    """The turn, accepted: it is never lost. `fork`: it goes on beside what goes on from there already."""
    origin, config = await _made_of(db, tenant, asked.model)
    served = await checked_model(db, config.model if config is not None else asked.model)
    model = served.name if origin is None else f"{AGENT_MODEL}{origin.agent}@{origin.version}"
    parent, before = await _behind(request.app, db, tenant, asked)
    lead, rest = opening(asked.items) if parent is None and not before else ([], asked.items)
    system = "\n\n".join(filter(None, [asked.instructions, *lead])) or None
    root = _root(model, system, asked)
    conversation = [*before, *rest]
    if parent is None and asked.previous is None and asked.conversation is None:
        parent, length = await _by_what_is_said(db, tenant, root, rest)
        if parent is not None:
            told = await responses.history(db, parent)
            rest = _in_our_words(rest[:length], told, rest[length:])
            conversation = [*told, *rest]
    response_id = asked.response_id or f"resp_{secrets.token_hex(16)}"
    place = await _in_place(db, parent, root, rest, fork) if parent is not None else None
    if place is None:
        _ensure_no_approval(rest)
        new = await _new_place(request, db, tenant, model, system, asked)
        place = replace(new, parent=parent, items=conversation)
    row = Row(
        response_id=response_id,
        tenant_id=tenant,
        session_id=place.session_id,
        parent_id=parent.response_id if parent is not None else None,
        conversation_id=asked.conversation,
        message_id=None,
        from_pos=0,
        end_pos=None,
        end_step=None,
        base={
            **asked.base,
            "id": response_id,
            "model": model,
            "_logprobs": asked.logprobs,
            "_chat": served.chat,
            "_functions": [one.name for one in (config.declared if config else ()) if isinstance(one, ClientTool)],
            "_asks": [*asked.tools.approvals, *(config.approvals if config is not None else ())],
            "_before": before if parent is None else [],
        },
        root=root,
        input=rest,
        kept=None,
        response=None,
        digest=None,
        stored=asked.stored,
    )
    held = {"_held": place.held, "_held_step": parent.end_step if parent is not None else None} if place.held else {}
    row = replace(row, base={**row.base, **held, "runtime": {"session": place.session_id}})
    try:
        row = await _say(request, db, row, place, asked)
    except RequestError as error:
        await responses.forget(db, row.response_id, row.session_id)
        if place.made:
            await following.end_session(request.app, tenant, place.session_id)
        if not isinstance(error, Conflict) or fork or place.parent is None:
            raise
        return await accept(request, db, tenant, asked, fork=True)  # somebody else was there first
    following.follow(request.app, row)
    return row


async def _made_of(db: Database, tenant: str, model: str) -> tuple[Origin | None, Wanted | None]:
    """The agent that is asked for in place of a model, and what it is made of. Raises InvalidRequest."""
    if not model.startswith(AGENT_MODEL):
        return None, None
    if not re.fullmatch(AGENT, model.removeprefix(AGENT_MODEL)):
        raise InvalidRequest(
            f"model: {model!r} names no agent; use {AGENT_MODEL}NAME or {AGENT_MODEL}NAME@3", param="model"
        )
    wanted, origin = await resolved(db, tenant, SessionIn(agent=model.removeprefix(AGENT_MODEL)))
    return origin, wanted


async def _behind(app: FastAPI, db: Database, tenant: str, asked: Asked) -> tuple[Row | None, Items]:
    """The response that this goes on from, and everything said so far. Raises NotFound, InvalidRequest."""
    if asked.previous is not None:
        parent = await responses.find(db, tenant, asked.previous)
        if parent is None or not parent.stored:
            raise InvalidRequest(
                f"previous_response_id: Previous response with id {asked.previous!r} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        parent = await following.ended(app, parent)
        if parent.response is None:
            raise Conflict(f"the response {parent.response_id} goes on; wait until it has ended", code="response_busy")
        return parent, await responses.history(db, parent)
    if asked.conversation is not None:
        await responses.conversation(db, tenant, asked.conversation)
        items = await responses.items_of(db, asked.conversation)
        last = await responses.last_of(db, asked.conversation)
        if last is not None:
            last = await following.ended(app, last)
            if last.response is None:
                raise Conflict(f"the conversation {asked.conversation} goes on; wait", code="conversation_busy")
            items = await responses.items_of(db, asked.conversation)
        said = [dict(row["item"]) for row in items]
        untouched = items and last is not None and items[-1]["response_id"] == last.response_id
        whole = await responses.history(db, last) if untouched and last is not None else []
        return (last if untouched and len(whole) == len(said) else None), said
    return None, []


def _root(model: str, system: str | None, asked: Asked) -> dict[str, Any]:
    root: dict[str, Any] = {"model": model, "system": system, "tools": list(asked.tools.told)}
    root["drops_output"] = asked.drops_output
    if asked.tools.approvals:
        root["approvals"] = dict(asked.tools.approvals)
    return json.loads(json.dumps(root))  # type: ignore[no-any-return]


async def _by_what_is_said(db: Database, tenant: str, root: Mapping[str, Any], items: Items) -> tuple[Row | None, int]:
    """The response that the conversation begins with, if one does, and how many of its items were said by then."""
    digests = Chain.of(root, items).digests
    found = await responses.ended_with(db, tenant, digests[1:-1]) if len(digests) > 2 else None
    return found, len(digests) - 1 - digests[::-1].index(found.digest or "") if found is not None else 0


def _in_our_words(sent: Items, told: Items, rest: Items) -> Items:
    """The rest, with results under the ids that we gave their calls: whoever sends a conversation may have others."""
    theirs, ours = ([item["call_id"] for item in items if item["type"] == "function_call"] for items in (sent, told))
    names = dict(zip(theirs, ours, strict=True))
    return [
        {**item, "call_id": names.get(item["call_id"], item["call_id"])}
        if item["type"] == "function_call_output"
        else item
        for item in rest
    ]


async def _in_place(db: Database, parent: Row, root: Mapping[str, Any], items: Items, fork: bool) -> _Place | None:
    """In the parent's session, or a fork of it; None where only a new one will do."""
    if parent.root != dict(root) or parent.response is None or parent.end_step is None:
        return None
    row = await db.fetchrow("SELECT state, ending FROM sessions WHERE session_id = $1", parent.session_id)
    if row is None or row["ending"] or row["state"] in (*TERMINAL, State.CANCELLING):
        return None
    kept = parent.kept or []
    asked = [item["id"] for item in kept if item["type"] == "mcp_approval_request"]
    done = parent.response["status"] in ("completed", "incomplete")
    if not fork and await responses.is_head(db, parent):
        if asked:
            return await _approving(db, parent, asked, items, row["state"])
        if row["state"] == State.WAITING and (_unanswered(kept) or not done):
            return await _answering(db, parent, items)
        if row["state"] == State.IDLE and not (done and await responses.is_behind(db, parent)):
            return _Place(parent.session_id, parent, items)
    if asked or not done or _unanswered(kept) or any(item["type"] == "function_call_output" for item in items):
        return None  # its calls are that session's
    _ensure_no_approval(items)
    child = sessions.new_id("ses")
    with contextlib.suppress(InvalidRequest, Conflict):
        await branches.fork(db, parent.tenant_id, parent.session_id, child, parent.end_step, None)
        return _Place(child, parent, items, made=True)
    return None


def _unanswered(items: Items) -> set[str]:
    outputs = {item["call_id"] for item in items if item["type"] == "function_call_output"}
    return {item["call_id"] for item in items if item["type"] == "function_call"} - outputs


def _ensure_no_approval(items: Items) -> None:
    """Raises InvalidRequest where an approval is given that nothing waits for. One of the past is of no matter."""
    for item in reversed(items):
        if item["type"] == "function_call" or item.get("role") == "assistant":
            return
        if item["type"] == "mcp_approval_response":
            raise InvalidRequest(
                f"input: the approval request {item['approval_request_id']!r} waits for no answer here",
                param="input",
                code="invalid_value",
            )


async def _approving(db: Database, parent: Row, asked: list[str], items: Items, state: str) -> _Place:
    """Answers to what was asked, or what follows where somebody else gave them. Raises InvalidRequest where one is
    missing, or comes too late."""
    given = {item["approval_request_id"]: item for item in items if item["type"] == "mcp_approval_response"}
    rows = await db.fetch(
        "SELECT question_id, call_no, state, about, answer FROM questions WHERE session_id = $1"
        " AND question_id = ANY($2::text[]) ORDER BY call_no",
        parent.session_id,
        asked,
    )
    answers, gave = {}, bool(given)
    for row in rows:
        question_id, one = row["question_id"], given.pop(row["question_id"], None)
        decision = None if one is None else "approve" if one["approve"] else "decline"
        if row["state"] == "open" and one is not None:
            reason = {"reason": one["reason"]} if one["reason"] and decision == "decline" else {}
            answers[question_id] = {"decision": decision, **reason}
        elif row["state"] == "open":
            raise _refused(f"No approval response found for approval request {question_id}.")
        elif decision is not None and decision != (row["answer"] or {}).get("decision"):
            raise _refused(f"the approval request {question_id!r} is {row['state']} already; that holds")
    if given:
        raise _refused(f"no approval request {next(iter(given))!r} waits for an answer")
    rest = [item for item in items if item["type"] not in UNREAD]
    if not answers and not gave:
        if state != State.IDLE:
            raise Conflict(f"the session {parent.session_id} goes on with what was approved; wait", code="session_busy")
        return _Place(parent.session_id, parent, rest)
    return _Place(parent.session_id, parent, rest, answers, await _held(db, parent, rows))


async def _held(db: Database, parent: Row, rows: Sequence[asyncpg.Record]) -> dict[str, dict[str, Any]]:
    output = await db.fetchrow(
        "SELECT output -> 'calls' AS calls FROM steps WHERE session_id = $1 AND step_no = $2",
        parent.session_id,
        parent.end_step,
    )
    calls = (output["calls"] if output else None) or []
    held: dict[str, dict[str, Any]] = {
        str(number): {"name": call["name"], "arguments": json.dumps(call.get("arguments") or {})}
        for number, call in enumerate(calls)
    }
    for row in rows:
        arguments = json.dumps(row["about"].get("arguments", {}))
        about = {"name": row["about"]["name"], "arguments": arguments, "question": row["question_id"]}
        held[str(row["call_no"])] = about
    return held


async def _answering(db: Database, parent: Row, items: Items) -> _Place:
    """Results of the calls that the session waits for. Raises InvalidRequest where one is missing."""
    open_ones = await db.fetch(
        "SELECT question_id, call_no, kind FROM questions WHERE session_id = $1 AND state = 'open' ORDER BY call_no",
        parent.session_id,
    )
    outputs = {item["call_id"]: item["output"] for item in items if item["type"] == "function_call_output"}
    answers = {}
    for question in open_ones:
        if question["kind"] != "client_tool":
            about = question["kind"].replace("_", " ")
            raise _refused(f"the session waits for an answer about {about}; give it at /v1/approvals")
        call = f"call_{parent.session_id.removeprefix('ses_')}_{parent.end_step}_{question['call_no']}"
        if call not in outputs:
            raise _refused(f"No tool output found for function call {call}.")
        answers[question["question_id"]] = {"decision": "result", "output": outputs.pop(call)}
    if outputs:
        raise _refused(f"no function call waits with the call_id {next(iter(outputs))!r}")
    rest = [item for item in items if item["type"] not in ("function_call_output", *UNREAD)]
    return _Place(parent.session_id, parent, rest, answers)


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(f"input: {message}", param="input", code="invalid_value")


async def _new_place(
    request: Request, db: Database, tenant: str, model: str, system: str | None, asked: Asked
) -> _Place:
    """A session that is yet to be made. Raises InvalidRequest."""
    said: dict[str, Any] = {
        "system": system,
        "tools": list(asked.tools.session),
        "approvals": dict(asked.tools.approvals),
        "context_policy": "drop_tool_output" if asked.drops_output else None,
    }
    agent = model.startswith(AGENT_MODEL)
    given = {"agent": model.removeprefix(AGENT_MODEL)} if agent else {"model": model}
    body = _made(SessionIn, {**given, **{name: value for name, value in said.items() if value}}, "tools")
    wanted, origin = await resolved(db, tenant, body)
    config = await checked(request, db, tenant, wanted)
    origin = replace(origin, metadata={**origin.metadata, "openai": str(asked.base.get("object", "response"))})
    return _Place(sessions.new_id("ses"), None, [], made=True, config=config, origin=origin)


async def _say(request: Request, db: Database, row: Row, place: _Place, asked: Asked) -> Row:
    """Tell the session. Raises RequestError where it cannot be told; then there is no response."""
    session = None if place.config is not None else await views.owned(db, row.tenant_id, place.session_id)
    config = place.config or SessionConfig.model_validate(session["config"] if session is not None else {})
    options = {
        "tool_choice": asked.tool_choice,
        "max_tool_rounds": _ROUNDS if asked.most_calls is None else asked.most_calls,
        "options": dict(asked.turn),
    }
    if place.goes_on and place.parent is not None:
        row = replace(row, from_pos=place.parent.end_pos or 0)
    elif session is not None:
        row = replace(row, from_pos=session["next_pos"] - 1)
    message = _message(place.items, options) if place.items or not place.goes_on else None
    if message is not None:
        await _check(request, db, config, message, None if session is None else place.session_id)
        row = replace(row, message_id=f"msg_{row.response_id.removeprefix('resp_')}")
    if place.config is not None:
        to = (row.tenant_id, row.session_id)
        await making.create(request, db, *to, place.config, secrets.randbelow(2**63), place.origin)
    if not await responses.add(db, row, asked.keep_s, asked.request_hash):
        raise Conflict("a request with this Idempotency-Key is on its way; try again", code="idempotency_busy")
    await _deliver(request, db, row, place, message, options)
    return row


async def _check(
    request: Request, db: Database, config: SessionConfig, message: MessageIn, session_id: str | None
) -> None:
    """Raises InvalidRequest where the session could not take the message."""
    served = await checked_model(db, config.model)
    try:
        message.check_against(config)
    except ValueError as error:
        raise InvalidRequest(f"tool_choice: {error}", param="tool_choice") from error
    await ensure_turn_works(config, served, message)
    counts = session_id is not None and config.context_policy == "fail"
    used = await views.token_count(db, session_id) if counts and session_id is not None else 0
    await ensure_it_fits(request, db, config, served, content=message.all_text, used=used)


async def _deliver(
    request: Request, db: Database, row: Row, place: _Place, message: MessageIn | None, options: Mapping[str, Any]
) -> None:
    """Raises Conflict where the session has gone on meanwhile."""
    temporal = request.app.state.temporal
    if place.answers:
        bare = MessageIn(content="x", **options).kept
        said = {"rest": True} if message is not None else {"options": bare}
        given = {question_id: {**one, "said": dict(said)} for question_id, one in place.answers.items()}
        for command_id in await questions.answer_all(db, row.tenant_id, given):
            if command_id is not None:
                send(request, delivery.command(temporal, place.session_id, command_id, "answer"))
    if message is not None and row.message_id is not None:
        accepted = (message.text or "(a conversation)", message.kept)
        on_busy = "enqueue" if place.goes_on else "reject"
        to = (row.tenant_id, place.session_id, row.message_id)
        await sessions.accept_message(db, *to, *accepted, on_busy=on_busy)
        send(request, delivery.deliver(temporal, place.session_id, row.message_id))


def _message(items: Items, options: Mapping[str, Any]) -> MessageIn:
    made = as_engine(items)
    if not made:
        raise InvalidRequest("input: say something", param="input", code="missing_required_parameter")
    if len(made) == 1 and made[0]["type"] == "said" and made[0]["role"] == "user" and made[0]["text"]:
        return _made(MessageIn, {**options, "content": made[0]["text"]}, "input")
    return _made(MessageIn, {**options, "items": made}, "input")


def _made(kind: type[Model], value: Mapping[str, Any], param: str) -> Model:
    """Raises InvalidRequest where what was asked for cannot be told a session."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        where, message = describe(error.errors())
        said = message.removeprefix(f"{where}: ")
        at = where or param
        for ours, theirs in _THEIR_WORDS.items():
            at = at.replace(ours, theirs)
        raise InvalidRequest(f"{at}: {said}", param=at, code="invalid_value") from None
