"""One tool step: every call of one assistant message, each through the ledger, each followed by its snapshot."""

from __future__ import annotations

import asyncio
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
from runtime.steps.fitting import fitted
from runtime.steps.pause import Wait, kv_pause
from runtime.steps.services import Services
from runtime.store import ledger, sessions, steps
from runtime.store.ledger import Call, Claim, call_key
from runtime.store.values import Attempt, Owner, Segment
from sandbox import TOOLS, BadArguments, Result, Sandbox, SandboxLost, tool_argv
from workflows.contract import StepIn
from workflows.states import Event as Move


@dataclass(frozen=True)
class Command:
    """What a call runs in the sandbox."""

    argv: Sequence[str]
    stdin: bytes
    timeout_s: float


class OutcomeUnknown(InvalidRequest):
    """An unsafe tool may have run; it is not run again without a person's word."""


async def run_tools(s: Services, what: StepIn, execution: str) -> None:
    session = await sessions.get(s.db, what.session_id)
    config = SessionConfig.model_validate(session.config)
    owner = s.owner(what.session_id, what.epoch)
    attempt = await steps.begin(s.db, owner, what.step_no, "tool", Move.RUN_TOOL, token=execution)
    if attempt.done is not None:
        return
    calls = await _calls_of(s, what, config)
    root = await checkpoints.workspace_root(s, what.session_id)
    before = await steps.transcript(s.db, what.session_id, what.step_no)
    results = []
    async with kv_pause(s, owner, attempt, config.kv.on_tool, _wait(config, calls), before):
        for call in calls:
            result, root = await _one_call(s, owner, attempt, config, call, root)
            results.append(result)
    context = s.engine.card.context_length
    answer = min(config.limits.max_think_tokens, context // 8)  # kept free for what the model says to it
    tokens = fitted(s.chat, results, context - len(before) - answer)
    await steps.complete(
        s.db,
        owner,
        attempt,
        segments=[Segment("tool", tokens)],
        output={"outcome": "settled", "calls": len(calls), "tokens": len(tokens)},
        checkpoint=await checkpoints.make(s, what.session_id, [*before, *tokens], root),
    )


def _wait(config: SessionConfig, calls: Sequence[Call]) -> Wait:
    """Calls run one after another, so their timeouts add up."""
    declared = {tool.name: tool.timeout_s for tool in config.tools if isinstance(tool, CommandTool)}
    timeouts = [declared.get(call.name, config.limits.tool_timeout_s) for call in calls]
    return Wait("+".join(dict.fromkeys(call.name for call in calls))[:200], sum(timeouts) or None)


async def _calls_of(s: Services, what: StepIn, config: SessionConfig) -> list[Call]:
    row = await s.db.fetchrow(
        "SELECT output FROM steps WHERE session_id = $1 AND step_no = $2", what.session_id, what.step_no - 1
    )
    assert row is not None, "a tool step follows its think"
    return [
        Call(i, call["name"], call["arguments"], _effect(s, config, call["name"]))
        for i, call in enumerate(row["output"]["calls"])
    ]


def _effect(s: Services, config: SessionConfig, name: str) -> str:
    """What a call may change. A writable volume leads out of the sandbox, where no snapshot undoes anything."""
    declared = next((t.effect for t in config.tools if isinstance(t, CommandTool) and t.name == name), None)
    own = declared or (TOOLS[name].effect if name in TOOLS else "sandboxed")
    leads_out = any(not volume.read_only for volume in s.volumes)
    return "unsafe" if own == "sandboxed" and declared is None and leads_out else own


async def _one_call(
    s: Services, owner: Owner, attempt: Attempt, config: SessionConfig, call: Call, root: str
) -> tuple[ToolResult, str]:
    """Settle one call and return what the model is told and the workspace after it."""
    claim = await ledger.claim(s.db, owner, attempt, call, root)
    if claim.result is None:
        claim = await _settle(s, owner, attempt, config, call, claim)
    assert claim.result is not None
    text = _as_text(claim.result, claim.output)
    return ToolResult(f"call_{attempt.step_no}_{call.call_no}", call.name, text), claim.snapshot_after or root


async def _settle(
    s: Services, owner: Owner, attempt: Attempt, config: SessionConfig, call: Call, claim: Claim
) -> Claim:
    try:
        command = _command(config, call)
    except (BadArguments, InvalidRequest) as refused:
        # The model asked for something that is no call; it is told so and may do better.
        result: dict[str, Any] = {"reason": "refused", "code": None}
        return await _record(s, owner, attempt, call, claim, result, str(refused).encode(), claim.snapshot_before)
    sandbox_id, sandbox = await open_box(s, owner, attempt, config, claim.snapshot_before)
    try:
        await _note_run(s, owner, attempt, call, claim, sandbox_id)
        done = await _call(sandbox, owner, attempt, config, call, command)
        async with s.blob_lock:
            after = await _workspace_after(s, sandbox, call, claim)
            return await _record(s, owner, attempt, call, claim, _facts(done), done.output, after)
    finally:
        await sandbox.close()


async def _note_run(s: Services, owner: Owner, attempt: Attempt, call: Call, claim: Claim, sandbox_id: str) -> None:
    """The call may run in this sandbox, and the ledger knows. Raises OutcomeUnknown where it may not run again."""
    if claim.runs and claim.sandbox_id == sandbox_id:
        return  # its journal runs a key once
    if claim.runs and call.effect == "unsafe":
        await ledger.mark_unknown(s.db, owner, attempt, call)
        raise OutcomeUnknown(
            f"{call.name} may have taken effect before its sandbox was lost, and it is unsafe to run it again;"
            " find out what happened and tell the session in a new message",
            code="outcome_unknown",
        )
    await ledger.note_run(s.db, owner, attempt, call, claim.runs + 1, sandbox_id)


async def _record(
    s: Services,
    owner: Owner,
    attempt: Attempt,
    call: Call,
    claim: Claim,
    result: dict[str, Any],
    output: bytes,
    after: str,
) -> Claim:
    await ledger.settle(s.db, owner, attempt, call, result, output, after)
    return Claim(result, output, claim.snapshot_before, after, claim.runs, claim.sandbox_id)


def _facts(done: Result) -> dict[str, Any]:
    return {
        "reason": done.reason,
        "code": done.code,
        "truncated": done.truncated,
        "stdout_bytes": done.stdout_bytes,
        "stderr_bytes": done.stderr_bytes,
    }


async def _call(
    sandbox: Sandbox, owner: Owner, attempt: Attempt, config: SessionConfig, call: Call, command: Command
) -> Result:
    """Start the call, or re-attach to it: the sandbox's journal runs a key once."""
    key = call_key(owner.session_id, attempt.step_no, call.call_no)
    running = await sandbox.start(
        key,
        command.argv,
        epoch=owner.epoch,
        stdin=command.stdin,
        env={"TENUTO_CALL_KEY": key},
        timeout_s=command.timeout_s,
        output_bytes=config.limits.tool_output_bytes,
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


async def _workspace_after(s: Services, sandbox: Sandbox, call: Call, claim: Claim) -> str:
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
        "signal": f"ended by signal {result['code']}",
    }.get(result["reason"], result["reason"])
    return f"{text}\n[{how}]".strip()
