"""One tool step: every call of one assistant message, each through the ledger, each followed by its snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from temporalio import activity

from engine.tokens import ToolResult
from runtime.config import CommandTool, SessionConfig
from runtime.errors import InvalidRequest
from runtime.steps import checkpoints
from runtime.steps.boxes import open_box
from runtime.steps.compacting import warning
from runtime.steps.fitting import fitted
from runtime.steps.gates import Held, approved, ask
from runtime.steps.pause import Wait, kv_pause
from runtime.steps.services import Services
from runtime.store import budgets, ledger, sessions, steps
from runtime.store.ledger import Call, Claim, call_key
from runtime.store.questions import Answer, Asked
from runtime.store.values import Attempt, Event, Owner, Segment
from sandbox import TOOLS, BadArguments, Result, Sandbox, SandboxLost, tool_argv
from workflows.contract import StepIn
from workflows.states import Event as Move


@dataclass(frozen=True)
class Command:
    """What a call runs in the sandbox."""

    argv: Sequence[str]
    stdin: bytes
    timeout_s: float


async def run_tools(s: Services, what: StepIn, execution: str) -> None:
    """Run the calls of the last think. Returns with the session waiting where an answer is missing first."""
    session = await sessions.get(s.db, what.session_id)
    config = SessionConfig.model_validate(session.config)
    owner = s.owner(what.session_id, what.epoch)
    attempt = await steps.begin(s.db, owner, what.step_no, "tool", Move.RUN_TOOL, token=execution)
    if attempt.done is not None or attempt.held:
        return
    calls, complaint = await calls_of(s, what, config)
    root = await checkpoints.workspace_root(s, what.session_id)
    before = await steps.transcript(s.db, what.session_id, what.step_no)
    if complaint:
        results = [ToolResult(f"call_{what.step_no}_0", "none", complaint)]
        await complete_tools(s, owner, attempt, config, before, results, root, outcome="corrected")
        return
    results = []
    with contextlib.suppress(Held):
        refused = await approved(s, owner, attempt, config, calls, before)
        async with kv_pause(s, owner, attempt, config.kv.on_tool, _wait(config, calls), before):
            for call in calls:
                step = Step(s, owner, attempt, config, before)
                result, root = await _one_call(step, call, root, refused.get(call.call_no))
                results.append(result)
        await complete_tools(s, owner, attempt, config, before, results, root, outcome="settled")


async def complete_tools(
    s: Services,
    owner: Owner,
    attempt: Attempt,
    config: SessionConfig,
    before: Sequence[int],
    results: Sequence[ToolResult],
    root: str,
    *,
    outcome: str,
) -> None:
    """End the step: what the model reads of its calls, and the workspace after them."""
    context = s.engine.card.context_length
    answer = min(config.limits.max_think_tokens, context // 8)  # kept free for what the model says to it
    tokens = fitted(s.chat, results, context - len(before) - answer)
    await steps.complete(
        s.db,
        owner,
        attempt,
        segments=[Segment("tool", tokens)],
        output={"outcome": outcome, "calls": len(results), "tokens": len(tokens)},
        checkpoint=await checkpoints.make(s, owner.session_id, [*before, *tokens], root),
        notes=[
            *warning(context, len(before), len(before) + len(tokens)),
            *([Event("session.interrupted")] if outcome == "interrupted" else []),
        ],
        to=Move.REST if outcome == "interrupted" else None,
    )


@dataclass(frozen=True)
class Step:
    """A tool step that runs. `before`: the transcript that it continues."""

    services: Services
    owner: Owner
    attempt: Attempt
    config: SessionConfig
    before: Sequence[int]


def _wait(config: SessionConfig, calls: Sequence[Call]) -> Wait:
    """Calls run one after another, so their timeouts add up."""
    declared = {tool.name: tool.timeout_s for tool in config.tools if isinstance(tool, CommandTool)}
    timeouts = [declared.get(call.name, config.limits.tool_timeout_s) for call in calls]
    return Wait("+".join(dict.fromkeys(call.name for call in calls))[:200], sum(timeouts) or None)


async def calls_of(s: Services, what: StepIn, config: SessionConfig) -> tuple[list[Call], str]:
    """The calls of the last think, or what is to be said to it instead of their results."""
    row = await s.db.fetchrow(
        "SELECT output FROM steps WHERE session_id = $1 AND step_no < $2 AND live AND kind = 'think'"
        " AND state = 'completed' ORDER BY step_no DESC LIMIT 1",
        what.session_id,
        what.step_no,
    )
    assert row is not None, "a tool step follows its think"
    calls = [
        Call(i, call["name"], call["arguments"], _effect(s, config, call["name"]))
        for i, call in enumerate(row["output"]["calls"])
    ]
    return calls, row["output"].get("complaint", "")


def _effect(s: Services, config: SessionConfig, name: str) -> str:
    """What a call may change. A writable volume leads out of the sandbox, where no snapshot undoes anything."""
    declared = next((t.effect for t in config.tools if isinstance(t, CommandTool) and t.name == name), None)
    own = declared or (TOOLS[name].effect if name in TOOLS else "sandboxed")
    leads_out = any(not volume.read_only for volume in s.volumes)
    return "unsafe" if own == "sandboxed" and declared is None and leads_out else own


async def _one_call(step: Step, call: Call, root: str, refused: str | None) -> tuple[ToolResult, str]:
    """Settle one call and return what the model is told and the workspace after it."""
    claim = await ledger.claim(step.services.db, step.owner, step.attempt, call, root)
    if claim.result is None and refused is not None:
        claim = await record(step, call, claim, {"reason": "refused", "code": None}, refused.encode(), root)
    if claim.result is None:
        claim = await _settle(step, call, claim)
    assert claim.result is not None
    return told(step.attempt, call, claim), claim.snapshot_after or root


def told(attempt: Attempt, call: Call, claim: Claim) -> ToolResult:
    assert claim.result is not None
    return ToolResult(f"call_{attempt.step_no}_{call.call_no}", call.name, _as_text(claim.result, claim.output))


async def _settle(step: Step, call: Call, claim: Claim) -> Claim:
    s = step.services
    try:
        command = _command(step.config, call)
    except (BadArguments, InvalidRequest) as refused:
        # The model asked for something that is no call; it is told so and may do better.
        result: dict[str, Any] = {"reason": "refused", "code": None}
        return await record(step, call, claim, result, str(refused).encode(), claim.snapshot_before)
    sandbox_id, sandbox = await open_box(s, step.owner, step.attempt, step.config, claim.snapshot_before)
    try:
        answered = await _may_run(step, call, claim, sandbox_id)
        if answered is not None:
            return answered
        done = await _call(sandbox, step, call, command)
        async with s.blob_lock:
            after = await workspace_after(s, sandbox, call, claim)
            return await record(step, call, claim, _facts(done), done.output, after)
    finally:
        await sandbox.close()


async def _may_run(step: Step, call: Call, claim: Claim, sandbox_id: str) -> Claim | None:
    """None: the call may run in this sandbox, and the ledger knows. Otherwise it is settled by what a person said.

    An unsafe call that may have taken effect before its sandbox was lost is not run again without a word. Raises Held
    while it is missing.
    """
    if claim.runs and claim.sandbox_id == sandbox_id:
        return None  # its journal runs a key once
    if claim.runs and call.effect == "unsafe":
        about = {"name": call.name, "arguments": dict(call.arguments), "effect": call.effect}
        asked = Asked("outcome", call.call_no, about)
        unknown = [call.call_no]
        [answer] = await ask(step.services, step.owner, step.attempt, [asked], step.before, unknown=unknown)
        if answer.decision != "did_not_run":
            return await record(step, call, claim, *_as_said(answer), claim.snapshot_before)
    await ledger.note_run(step.services.db, step.owner, step.attempt, call, claim.runs + 1, sandbox_id)
    return None


def _as_said(answer: Answer) -> tuple[dict[str, Any], bytes]:
    """Result and output of a call of which a person knows how it ended."""
    if answer.decision == "ran":
        return {"reason": "exit", "code": 0, "told": True}, str(answer.answer.get("output") or "").encode()
    reason = str(answer.answer.get("reason") or "nobody knows whether it took effect, and it is not run again")
    return {"reason": "refused", "code": None, "told": True}, reason.encode()


async def record(step: Step, call: Call, claim: Claim, result: dict[str, Any], output: bytes, after: str) -> Claim:
    await ledger.settle(step.services.db, step.owner, step.attempt, call, result, output, after)
    return Claim(result, output, claim.snapshot_before, after, claim.runs, claim.sandbox_id)


def _facts(done: Result) -> dict[str, Any]:
    return {
        "reason": done.reason,
        "code": done.code,
        "truncated": done.truncated,
        "stdout_bytes": done.stdout_bytes,
        "stderr_bytes": done.stderr_bytes,
    }


async def _call(sandbox: Sandbox, step: Step, call: Call, command: Command) -> Result:
    """Start the call, or re-attach to it: the sandbox's journal runs a key once."""
    key = call_key(step.owner.session_id, step.attempt.step_no, call.call_no)
    seconds = budgets.left(step.attempt.session, "tool_s")
    running = await sandbox.start(
        key,
        command.argv,
        epoch=step.owner.epoch,
        stdin=command.stdin,
        env={"TENUTO_CALL_KEY": key},
        timeout_s=command.timeout_s if seconds is None else max(1.0, min(command.timeout_s, seconds)),
        output_bytes=step.config.limits.tool_output_bytes,
    )
    try:
        result = await running.result()
    except asyncio.CancelledError:
        if not activity.is_worker_shutdown():  # cancelled, not drained: the tool must not go on
            await asyncio.shield(sandbox.kill(key))
        raise
    if result.reason == "lost":
        raise SandboxLost(f"the sandbox went away while {call.name} ran in it")
    return result


async def interrupt_tools(s: Services, owner: Owner, config: SessionConfig, what: StepIn, execution: str) -> None:
    """End the tool step: calls that settled keep their results, the others are told as interrupted."""
    attempt = await steps.begin(s.db, owner, what.step_no, "tool", None, token=execution, stopping=True)
    if attempt.done is not None:
        return
    before = await steps.transcript(s.db, what.session_id, what.step_no)
    root = await checkpoints.workspace_root(s, what.session_id)
    step = Step(s, owner, attempt, config, before)
    results = []
    calls, complaint = await calls_of(s, what, config)
    if complaint:
        results.append(ToolResult(f"call_{what.step_no}_0", "none", complaint))
    for call in calls:
        claim = await ledger.claim(s.db, owner, attempt, call, root)
        if claim.result is None:
            claim = await _interrupt_call(step, call, claim)
        root = claim.snapshot_after or root
        results.append(told(attempt, call, claim))
    await complete_tools(s, owner, attempt, config, before, results, root, outcome="interrupted")


async def _interrupt_call(step: Step, call: Call, claim: Claim) -> Claim:
    result = {"reason": "interrupted", "code": None}
    if not claim.runs:
        return await record(step, call, claim, result, b"it had not begun", claim.snapshot_before)
    s, after = step.services, claim.snapshot_before
    sandbox_id, sandbox = await open_box(s, step.owner, step.attempt, step.config, claim.snapshot_before)
    try:
        if sandbox_id == claim.sandbox_id:
            await sandbox.kill(call_key(step.owner.session_id, step.attempt.step_no, call.call_no))
            async with s.blob_lock:
                after = await workspace_after(s, sandbox, call, claim)
                return await record(step, call, claim, result, b"it was stopped; what it did until then stays", after)
    finally:
        await sandbox.close()
    return await record(step, call, claim, result, b"it was stopped; it may have taken effect", after)


async def workspace_after(s: Services, sandbox: Sandbox, call: Call, claim: Claim) -> str:
    writes = call.name not in TOOLS or TOOLS[call.name].writes  # commands may not take a built-in's name
    return await sandbox.snapshot(s.blobs) if writes and call.effect != "pure" else claim.snapshot_before


def _command(config: SessionConfig, call: Call) -> Command:
    for tool in config.tools:
        if isinstance(tool, CommandTool) and tool.name == call.name:
            stdin = json.dumps(dict(call.arguments)).encode()
            return Command(tool.command, stdin, tool.timeout_s)
        if tool == call.name:
            argv, stdin = tool_argv(call.name, call.arguments)
            return Command(argv, stdin, config.limits.tool_timeout_s)
    raise InvalidRequest(f"there is no tool {call.name!r}; there are {', '.join(config.tool_names) or 'none'}")


def _as_text(result: Mapping[str, Any], output: bytes) -> str:
    """What the model reads: the output, and how the call ended where that is not plain success."""
    text = output.decode("utf-8", "replace").strip()
    if result["reason"] == "exit" and result["code"] == 0:
        return text or "(no output)"
    how = {
        "exit": f"exit code {result['code']}",
        "refused": "not executed",
        "timeout": "stopped at its time limit",
        "oom": "stopped at its memory limit",
        "interrupted": "interrupted by the user",
        "signal": f"ended by signal {result['code']}",
    }.get(result["reason"], result["reason"])
    return f"{text}\n[{how}]".strip()
