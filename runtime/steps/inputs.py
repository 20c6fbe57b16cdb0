"""Take a message into the transcript: tokenised once, here, and never again."""

from __future__ import annotations

import asyncio

from runtime.config import SessionConfig
from runtime.errors import InvalidRequest
from runtime.steps import checkpoints
from runtime.steps.listing import catalog, ensure_listed
from runtime.steps.services import Services
from runtime.store import sessions, steps
from runtime.store.values import Segment
from sandbox import snapshots
from workflows.contract import InputIn
from workflows.states import Event as Move


async def take(s: Services, what: InputIn, execution: str) -> None:
    """Take the oldest message that waits; none is no step. `what.message_id` only said that there is one.

    Raises InvalidRequest if the transcript would not fit into the model's context.
    """
    session = await sessions.get(s.db, what.session_id)
    config = SessionConfig.model_validate(session.config)
    message = await sessions.message_to_take(s.db, what.session_id, what.step_no)
    if message is None:
        return
    message_id, content, options = message
    owner = s.owner(what.session_id, what.epoch)
    attempt = await steps.begin(s.db, owner, what.step_no, "input", Move.THINK, token=execution, message_id=message_id)
    if attempt.done is not None or attempt.held:
        return
    before = await steps.transcript(s.db, what.session_id, what.step_no)
    segments = []
    if not before:
        await ensure_listed(s, owner, attempt, config)
        tools, _ = await catalog(s, what.session_id, config)
        segments.append(Segment("scaffold", s.chat.opening(config.system, tools.specs)))
    segments.append(Segment("message", s.chat.user(content)))
    after = [*before, *(token for segment in segments for token in segment.token_ids)]
    if len(after) >= s.engine.card.context_length:
        raise InvalidRequest(
            f"the transcript would have {len(after)} tokens, the model's context holds"
            f" {s.engine.card.context_length}; send less or start a new session",
            code="context_length_exceeded",
        )
    async with s.blob_lock:
        root = await checkpoints.workspace_root(s, what.session_id) or await asyncio.to_thread(
            snapshots.seed, {name: text.encode() for name, text in config.files.items()}, s.blobs
        )
        await steps.complete(
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
            checkpoint=await checkpoints.make(s, what.session_id, after, root),
        )
