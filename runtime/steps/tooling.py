"""One tool step: the calls of one assistant message, from what must be known before them to what the model reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.tokens import ToolResult
from runtime.config import SessionConfig
from runtime.steps import checkpoints
from runtime.steps.calls import Step, interrupt_call, rounds, run_calls, told
from runtime.steps.compacting import warning
from runtime.steps.fitting import fitted
from runtime.steps.gates import Held, approved
from runtime.steps.listing import catalog
from runtime.steps.measuring import measure
from runtime.steps.pause import Wait, kv_pause
from runtime.steps.recent import Past, past
from runtime.steps.services import Services
from runtime.steps.unsealing import Opened, opened
from runtime.store import ledger, steps
from runtime.store.ledger import Call
from runtime.store.standing import Standing
from runtime.store.values import Attempt, Event, Owner, Segment
from runtime.tools.catalog import Catalog
from workflows.contract import StepIn
from workflows.states import Event as Move


async def run_tools(s: Services, what: StepIn, execution: str) -> Standing | None:
    """Run the calls of the last think. Returns with the session waiting where an answer is missing first.

    Where the session stands then; None where that is for the record to say.
    """
    owner = s.owner(what.session_id, what.epoch)
    attempt, behind = await asyncio.gather(
        steps.begin(s.db, owner, what.step_no, "tool", Move.RUN_TOOL, token=execution),
        past(s.db, s.recent, what),
    )
    if attempt.done is not None or attempt.held:
        return None
    config = SessionConfig.model_validate(attempt.session.config)
    tools, listings = await catalog(s, what.session_id, config)
    values = await opened(s, attempt.session.tenant_id, config)
    calls, complaint = calls_of(behind, tools, values)
    root = behind.base.workspace_root
    if complaint:
        answer = [ToolResult(f"call_{what.step_no}_0", "none", complaint)]
        return await complete_tools(s, owner, attempt, config, behind, answer, root, outcome="corrected")
    with contextlib.suppress(Held):
        refused, said = await approved(s, owner, attempt, config, calls, behind.tokens)
        refused |= {call.call_no: call.lost for call in calls if call.lost}
        async with (
            kv_pause(s, owner, attempt, config.kv.on_tool, _wait(tools, calls), behind.tokens),
            Step(s, owner, attempt, config, behind.tokens, tools, listings, values) as step,
        ):
            step.said = said
            results, root = await run_calls(step, calls, root, refused)
            said = step.said
        return await complete_tools(s, owner, attempt, config, behind, results, root, outcome="settled", said=said)
    return None


async def complete_tools(
    s: Services,
    owner: Owner,
    attempt: Attempt,
    config: SessionConfig,
    behind: Past,
    results: Sequence[ToolResult],
    root: str,
    *,
    outcome: str,
    said: Mapping[str, Any] | None = None,
) -> Standing:
    """End the step: what the model reads of its calls, and the workspace after them. `said`: what the caller said with
    the results of its own ones: `options` of what follows, and whether to `rest` instead."""
    said = said or {}
    outcome = "interrupted" if said.get("rest") else outcome
    measured = await measure(s, owner.session_id)
    most = measured.of(config.limits.max_think_tokens)
    answer = min(most, measured.context // 8)  # kept free for what the model says to it
    before = len(behind.tokens)
    tokens = fitted(s.chat, results, measured.context - before - answer)
    after = [*behind.tokens, *tokens]
    checkpoint = checkpoints.carried(s.engine.card, after, root, behind.base.tail)
    ended = await steps.complete(
        s.db,
        owner,
        attempt,
        segments=[Segment("tool", tokens)],
        output={"outcome": outcome, "calls": len(results), "tokens": len(tokens), **_options(said)},
        checkpoint=checkpoint,
        notes=[
            *warning(measured, before, len(after)),
            *([Event("session.interrupted")] if outcome == "interrupted" and not said else []),
        ],
        to=Move.REST if outcome == "interrupted" else None,
    )
    if ended.mine:
        if "options" in said:
            behind = replace(behind, turn=said["options"].get("turn", {}))
        s.recent.keep(owner.session_id, owner.epoch, attempt.step_no, behind.after(attempt.session, checkpoint, after))
    return ended.standing


def _options(said: Mapping[str, Any]) -> dict[str, Any]:
    return {"options": said["options"]} if "options" in said else {}


def _wait(tools: Catalog, calls: Sequence[Call]) -> Wait:
    """Rounds follow one another, so their timeouts add up; within one, the longest counts."""
    longest = [
        max((known.timeout_s for call in together if (known := tools.get(call.name))), default=0.0)
        for together in rounds(tools, calls)
    ]
    return Wait("+".join(dict.fromkeys(call.name for call in calls))[:200], sum(longest) or None)


def calls_of(behind: Past, tools: Catalog, values: Opened) -> tuple[list[Call], str]:
    """The calls of a think, or what is to be said to it instead of their results."""
    said = behind.said
    assert said is not None, "a tool step follows its think"
    calls = [
        Call(i, call["name"], arguments, known.effect if known else "pure", values.redactor.json(arguments), lost)
        for i, call in enumerate(said["calls"])
        for (arguments, lost), known in [(values.found(call), tools.get(call["name"]))]
    ]
    return calls, said.get("complaint", "")


async def interrupt_tools(s: Services, owner: Owner, config: SessionConfig, what: StepIn, execution: str) -> None:
    """End the tool step: calls that settled keep their results, the others are told as interrupted."""
    attempt = await steps.begin(s.db, owner, what.step_no, "tool", None, token=execution, stopping=True)
    if attempt.done is not None:
        return
    behind = await past(s.db, s.recent, what)
    root = behind.base.workspace_root
    tools, listings = await catalog(s, what.session_id, config)
    results = []
    values = await opened(s, attempt.session.tenant_id, config)
    async with Step(s, owner, attempt, config, behind.tokens, tools, listings, values) as step:
        calls, complaint = calls_of(behind, tools, values)
        if complaint:
            results.append(ToolResult(f"call_{what.step_no}_0", "none", complaint))
        for call in calls:
            claim = await ledger.claim(s.db, owner, attempt, call, root)
            if claim.result is None:
                claim = await interrupt_call(step, call, claim)
            root = claim.snapshot_after or root
            results.append(told(attempt, call, claim))
    await complete_tools(s, owner, attempt, config, behind, results, root, outcome="interrupted")
