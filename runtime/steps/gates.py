"""What must be known before a call runs: a person's approval, or the caller's own result."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine import EngineError, EngineGone
from runtime.config import SessionConfig
from runtime.steps.services import Services
from runtime.store import steps
from runtime.store.ledger import Call
from runtime.store.questions import Answer, Asked
from runtime.store.values import Attempt, Owner


class Held(Exception):
    """The session waits; the step goes on when what it waits for is there."""


class Approved(NamedTuple):
    """`refused`: why calls may not run, by number; one that is not in it may. `said`: what came with the answers, as
    with the results of calls that ran at the caller."""

    refused: dict[int, str]
    said: Mapping[str, Any]


async def approved(
    s: Services, owner: Owner, attempt: Attempt, config: SessionConfig, calls: Sequence[Call], tokens: Sequence[int]
) -> Approved:
    """Raises Held while a decision is missing."""
    needed = [call for call in calls if config.approval_of(call.name) is not None]
    asked = [_for_approval(config, call) for call in needed]
    answers = await ask(s, owner, attempt, asked, tokens) if asked else []
    refused = {
        call.call_no: _why_not(answer)
        for call, answer in zip(needed, answers, strict=True)
        if answer.decision != "approve"
    }
    said = [answer.answer["said"] for answer in answers if answer.answer.get("said")]
    return Approved(refused, said[-1] if said else {})


def _for_approval(config: SessionConfig, call: Call) -> Asked:
    approval = config.approval_of(call.name)
    assert approval is not None
    about = {"name": call.name, "arguments": call.told, "effect": call.effect}
    return Asked("approval", call.call_no, about, approval.deadline_s)


def _why_not(answer: Answer) -> str:
    if answer.state == "expired":
        return "it needed approval, and nobody gave it in time"
    reason = str(answer.answer.get("reason") or "").strip()
    return f"it was declined: {reason}" if reason else "it was declined"


async def ask(
    s: Services,
    owner: Owner,
    attempt: Attempt,
    asked: Sequence[Asked],
    tokens: Sequence[int],
    *,
    unknown: Sequence[int] = (),
) -> list[Answer]:
    """The answers, all of them. Raises Held while one is missing; the session's pages give way meanwhile."""
    answers = await steps.hold(s.db, owner, attempt, asked, unknown=unknown)
    if any(answer.state == "open" for answer in answers):
        await demote(s, owner, attempt.session.salt, attempt.step_no, tokens, state=asked[0].kind)
        raise Held(f"the session waits for {asked[0].kind}")
    return answers


async def demote(s: Services, owner: Owner, salt: bytes, step_no: int, tokens: Sequence[int], *, state: str) -> None:
    """People take their time: the session's pages go down at once, where the policy finds that it pays."""
    pause: Mapping[str, Any] = {"state": "approval", "tool": state, "timeout_s": None}
    with contextlib.suppress(EngineGone, EngineError):
        client = await s.engine.client()
        await client.kv(
            "offload",
            session=owner.session_id,
            epoch=owner.epoch,
            salt=salt,
            token_ids=tokens,
            tier="auto",
            wait=False,
            evict=False,
            pause=pause,
            step=step_no,
        )
