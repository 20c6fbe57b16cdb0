"""Take a message into the transcript: tokenised once, here, and never again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from engine.tokens import Call, ChatFormat, ToolResult
from runtime.config import SessionConfig
from runtime.errors import InvalidRequest
from runtime.steps import checkpoints
from runtime.steps.compacting import reserve, warning
from runtime.steps.fitting import fitted
from runtime.steps.listing import catalog, ensure_listed
from runtime.steps.measuring import measure
from runtime.steps.recent import Past, past
from runtime.steps.services import Services
from runtime.store import sessions, standing, steps
from runtime.store.standing import Standing
from runtime.store.values import Segment
from runtime.tools.outcome import as_text
from sandbox import snapshots
from workflows.contract import InputIn
from workflows.states import Event as Move

DID_NOT_END = "[the call did not end: the step failed]"


class Taken(NamedTuple):
    """`fits`: False where the session's policy can make room first; `standing`: where the session stands then, None
    where that is for the record to say."""

    fits: bool
    standing: Standing | None = None


async def take(s: Services, what: InputIn, execution: str, *, stopping: bool = False) -> Taken:
    """Take the oldest message that waits; none is no step. `what.message_id` only said that there is one. `stopping`:
    its turn is to end there, be the session paused or not.

    Raises InvalidRequest if the transcript would not fit into the model's context, and no room can be made.
    """
    message, behind = await asyncio.gather(
        sessions.message_to_take(s.db, what.session_id, what.step_no), past(s.db, s.recent, what)
    )
    if message is None:
        return Taken(True)
    before = behind.tokens
    session = behind.session or await sessions.get(s.db, what.session_id)
    config = SessionConfig.model_validate(session.config)
    message_id, content, options = message
    owner = s.owner(what.session_id, what.epoch)
    items = options.pop("items", None)
    written = rendered(s.chat, items) if items else s.chat.user(content)
    segments = [*await _unanswered(s, what, behind), Segment("message", written)]
    measured = await measure(s, what.session_id)
    if before and await _may_make_room(s, config, what.session_id, len(before) + _size(segments)):
        return Taken(False)
    to = None if stopping else Move.THINK
    attempt = await steps.begin(
        s.db, owner, what.step_no, "input", to, token=execution, message_id=message_id, stopping=stopping
    )
    if attempt.done is not None or attempt.held:
        return Taken(True)
    if not before:
        await ensure_listed(s, owner, attempt, config)
        tools, _ = await catalog(s, what.session_id, config)
        segments.insert(0, Segment("scaffold", s.chat.opening(config.system, tools.specs)))
    after = [*before, *(token for segment in segments for token in segment.token_ids)]
    if len(after) >= measured.most:
        raise InvalidRequest(
            f"the transcript would have {len(after)} tokens, the model's context holds {measured.most}; send less or"
            " start a new session",
            code="context_length_exceeded",
        )
    async with s.blob_lock:
        root = behind.base.workspace_root or await asyncio.to_thread(
            snapshots.seed, {name: text.encode() for name, text in config.files.items()}, s.blobs
        )
        checkpoint = checkpoints.carried(s.engine.card, after, root, behind.base.tail)
        ended = await steps.complete(
            s.db,
            owner,
            attempt,
            segments=segments,
            output={
                "outcome": "input",
                "message_id": message_id,
                "tokens": len(after) - len(before),
                "options": options,
            },
            checkpoint=checkpoint,
            notes=warning(measured, len(before), len(after)),
        )
    if ended.mine:
        behind = replace(behind, turn=options.get("turn", {}))
        s.recent.keep(owner.session_id, owner.epoch, what.step_no, behind.after(attempt.session, checkpoint, after))
    return Taken(True, ended.standing)


def rendered(chat: ChatFormat, items: Sequence[Mapping[str, Any]]) -> list[int]:
    """A conversation that was held elsewhere (`Item`s), as this model writes it: an assistant's text and the calls
    after it are one message, and so are results that follow one another."""
    tokens: list[int] = []
    said, calls, results = "", list[Call](), list[ToolResult]()

    def close() -> None:
        nonlocal said
        if said or calls:
            tokens.extend(chat.assistant(said, calls))
        if results:
            tokens.extend(chat.tool_results(results))
        said = ""
        calls.clear()
        results.clear()

    for item in items:
        kind = item["type"]
        if kind == "result":
            if said or calls:
                close()
            results.append(ToolResult(item["call_id"], item["name"], item["output"]))
        elif kind == "called":
            if results:
                close()
            calls.append(Call(item["name"], item["arguments"], ""))
        else:
            if results or calls or item["role"] == "user" or said:
                close()
            if item["role"] == "user":
                tokens.extend(chat.user(item["text"]))
            else:
                said = item["text"]
    close()
    return tokens


def _size(segments: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in segments)


async def _unanswered(s: Services, what: InputIn, behind: Past) -> list[Segment]:
    """Results for the calls of a think whose tool step failed: what the ledger knows, and that the rest did not end.
    A template that finds a call without a result would refuse every later request."""
    if behind.said is None or behind.said.get("outcome") != "tools":
        return []
    row = await s.db.fetchrow(
        "SELECT step_no FROM steps WHERE session_id = $1 AND step_no < $2 AND live"
        " AND state = 'completed' AND kind IN ('input', 'think', 'tool') ORDER BY step_no DESC LIMIT 1",
        what.session_id,
        what.step_no,
    )
    assert row is not None, "it said so"
    rows = await s.db.fetch(
        "SELECT call_no, result, output FROM tool_calls WHERE session_id = $1 AND step_no > $2 AND status = 'settled'"
        " ORDER BY step_no",
        what.session_id,
        row["step_no"],
    )
    settled = {one["call_no"]: as_text(one["result"], one["output"] or b"") for one in rows}
    calls = [*enumerate(behind.said["calls"])] or [(0, {"name": "none"})]
    results = [
        ToolResult(f"call_{row['step_no']}_{no}", call["name"], settled.get(no, DID_NOT_END)) for no, call in calls
    ]
    room = (await measure(s, what.session_id)).context // 8
    return [Segment("tool", fitted(s.chat, results, room))]


async def _may_make_room(s: Services, config: SessionConfig, session_id: str, tokens: int) -> bool:
    """Whether a compaction should come first: the message and an answer to it do not fit, and none was just tried."""
    measured = await measure(s, session_id)
    if (
        config.context_policy == "fail"
        or tokens + reserve(config.limits.max_think_tokens, measured) <= measured.context
    ):
        return False
    at = await s.db.run(lambda c: standing.progress(c, session_id))
    return not at.compacted
