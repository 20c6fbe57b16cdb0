"""Calls of one tool step: each through the ledger, each run where it belongs, some of them at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from engine.tokens import ToolResult
from runtime.config import SessionConfig
from runtime.errors import InvalidRequest
from runtime.steps.boxes import open_box
from runtime.steps.children import Child, end_child, run_child
from runtime.steps.gates import ask
from runtime.steps.services import Services
from runtime.steps.unsealing import Opened, Unopened, opened
from runtime.steps.way_out import WayOut
from runtime.store import budgets, ledger
from runtime.store.ledger import Call, Claim, call_key
from runtime.store.questions import Answer, Asked
from runtime.store.values import Attempt, Owner
from runtime.tools.catalog import Catalog, Known, Listings
from runtime.tools.kinds import ClientTool, SessionTool
from runtime.tools.outcome import Outcome, as_text
from runtime.tools.running import Place, check, run_inside, run_outside, stop_inside
from sandbox import BadArguments, EgressRefused, Sandbox

AT_ONCE = 8
OUTSIDE = "outside"  # where a run begins that no sandbox's journal knows of


@dataclass
class Step:
    """A tool step that runs. `before`: the transcript that it continues; `values`: what its tools' secrets are. Its
    sandbox is opened when a call needs it."""

    services: Services
    owner: Owner
    attempt: Attempt
    config: SessionConfig
    before: Sequence[int]
    tools: Catalog
    listings: Listings
    values: Opened
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _box: tuple[str, Sandbox] | None = None
    _greeting: dict[str, asyncio.Lock] = field(default_factory=dict)
    way_out: WayOut = field(init=False)
    said: Mapping[str, Any] = field(default_factory=dict)  # by the caller, with the results of its calls

    async def __aenter__(self) -> Self:
        self.way_out = WayOut(self.services, self.owner, self.attempt.step_no, self.config)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.way_out.close()
        if self._box is not None:
            await self._box[1].close()

    async def box(self, root: str) -> tuple[str, Sandbox]:
        """The sandbox's id, and the sandbox; a new one holds the workspace `root`."""
        async with self._opening:
            if self._box is None:
                self._box = await open_box(self.services, self.owner, self.attempt, self.config, root)
                await self.way_out.open(self._box[1])
            return self._box

    async def ready(self, known: Known) -> Known:
        """The tool with its secrets as they are now. Raises Unopened."""
        if isinstance(known.declared, str) or not known.declared.secrets:
            return known
        now = await opened(self.services, self.attempt.session.tenant_id, self.config, using=True)
        # What was a secret when the step began is none to be told either.
        self.values = replace(now, redactor=now.redactor.also(self.values.redactor))
        return replace(known, declared=now.tool(known.declared))

    def child(self, call: Call) -> Child:
        """The session that a call of a session tool is."""
        key = call_key(self.owner.session_id, self.attempt.step_no, call.call_no)
        return Child(key, self.attempt.session, self.attempt.step_no, call.call_no)

    def place(self, call: Call, known: Known, *, again: bool) -> Place:
        """What the run of a call is told, whichever kind it is."""
        server = known.spec.name.partition("__")[0]
        seconds = budgets.left(self.attempt.session, "tool_s")
        return Place(
            key=call_key(self.owner.session_id, self.attempt.step_no, call.call_no),
            epoch=self.owner.epoch,
            again=again,
            timeout_s=known.timeout_s if seconds is None else max(1.0, min(known.timeout_s, seconds)),
            output_bytes=self.config.limits.tool_output_bytes,
            handshake=self.listings.get(server, {}).get("handshake"),
            greeting=self._greeting.setdefault(server, asyncio.Lock()),
        )


async def run_calls(
    step: Step, calls: Sequence[Call], root: str, refused: Mapping[int, str]
) -> tuple[list[ToolResult], str]:
    """Settle the calls and return what the model is told of each, in their order, and the workspace after them.

    One that may write the workspace runs alone; others run together with their neighbours. A failure of one does not
    cut off the rest: each is settled, or its record says what it is. Raises Held while a person's word is missing.
    """
    results: dict[int, ToolResult] = {}
    here = [call for call in calls if not _is_the_callers(step, call)]
    for together in rounds(step.tools, here):
        limit = asyncio.Semaphore(AT_ONCE)
        alone = len(together) == 1
        claims = [(call, await _claimed(step, call, root, refused.get(call.call_no), alone)) for call in together]
        claims = await _answered(step, claims)
        settled = await asyncio.gather(*(_settled(step, *each, limit) for each in claims), return_exceptions=True)
        for (call, _), claim in zip(claims, settled, strict=True):
            if isinstance(claim, BaseException):
                raise claim
            root = claim.snapshot_after or root
            results[call.call_no] = told(step.attempt, call, claim)
    theirs = [call for call in calls if _is_the_callers(step, call)]
    for call, claim in await _by_the_caller(step, theirs, root, refused):
        results[call.call_no] = told(step.attempt, call, claim)
    return [results[call.call_no] for call in calls], root


def _is_the_callers(step: Step, call: Call) -> bool:
    known = step.tools.get(call.name)
    return known is not None and isinstance(known.declared, ClientTool)


async def _by_the_caller(
    step: Step, calls: Sequence[Call], root: str, refused: Mapping[int, str]
) -> list[tuple[Call, Claim]]:
    """Ask the caller for the results of its tools, all at once. Raises Held until it has given them."""
    claims = [(call, await _claimed(step, call, root, refused.get(call.call_no))) for call in calls]
    open_ones = [(call, claim) for call, claim in claims if claim.result is None]
    if not open_ones:
        return claims
    asked = [_for_result(step, call) for call, _ in open_ones]
    answers = await ask(step.services, step.owner, step.attempt, asked, step.before)
    for answer in answers:
        step.said = answer.answer.get("said") or step.said
    given = {
        call.call_no: await record(step, call, claim, _given(step, answer), claim.snapshot_before)
        for (call, claim), answer in zip(open_ones, answers, strict=True)
    }
    return [(call, given.get(call.call_no, claim)) for call, claim in claims]


def _for_result(step: Step, call: Call) -> Asked:
    declared = step.tools.find(call.name).declared
    assert isinstance(declared, ClientTool)
    about = {"name": call.name, "arguments": dict(call.arguments)}  # the caller is to run it as it is
    return Asked("client_tool", call.call_no, about, declared.deadline_s)


def _given(step: Step, answer: Answer) -> Outcome:
    if answer.state == "expired":
        return Outcome("timeout", None, b"the caller gave no result in time")
    output = str(answer.answer.get("output") or "").encode()
    limit = step.config.limits.tool_output_bytes
    reason, code = ("error", None) if answer.answer.get("is_error") else ("exit", 0)
    return Outcome(reason, code, output[:limit], len(output) > limit, {"told": True})


def rounds(tools: Catalog, calls: Sequence[Call]) -> Iterator[list[Call]]:
    """Neighbours that cannot change the workspace together, every other call by itself, in the order of the calls."""
    together: list[Call] = []
    for call in calls:
        known = tools.get(call.name)
        if known is None or not known.writes:
            together.append(call)
            continue
        if together:
            yield together
        together = []
        yield [call]
    if together:
        yield together


def told(attempt: Attempt, call: Call, claim: Claim) -> ToolResult:
    assert claim.result is not None
    return ToolResult(f"call_{attempt.step_no}_{call.call_no}", call.name, as_text(claim.result, claim.output))


async def _claimed(step: Step, call: Call, root: str, refused: str | None, alone: bool = False) -> Claim:
    """`alone`: the call would run at once, waiting for no other."""
    at_once = alone and refused is None and step.attempt.attempt_no == 1 and _can_run_inside(step, call)
    run_in = (await step.box(root))[0] if at_once else None
    claim = await ledger.claim(step.services.db, step.owner, step.attempt, call, root, run_in=run_in)
    if claim.result is None and refused is not None:
        return await record(step, call, claim, Outcome.refused(refused), claim.snapshot_before)
    return claim


def _can_run_inside(step: Step, call: Call) -> bool:
    known = step.tools.get(call.name)
    if known is None or known.outside:
        return False
    try:
        check(step.services.egress, known, call.arguments)
        if not isinstance(known.declared, str):
            step.values.tool(known.declared)
    except (BadArguments, InvalidRequest, EgressRefused, Unopened):
        return False
    return True


async def _answered(step: Step, claims: Sequence[tuple[Call, Claim]]) -> list[tuple[Call, Claim]]:
    """The same, where those that may have taken effect unseen are settled by what a person said, or may run again.

    An unsafe call that may have taken effect is not run again without a word. Raises Held while it is missing.
    """
    unknown = [(call, claim) for call, claim in claims if await _is_unknown(step, call, claim)]
    if not unknown:
        return list(claims)
    asked = [
        Asked("outcome", call.call_no, {"name": call.name, "arguments": call.told, "effect": call.effect})
        for call, _ in unknown
    ]
    numbers = [call.call_no for call, _ in unknown]
    answers = await ask(step.services, step.owner, step.attempt, asked, step.before, unknown=numbers)
    said = {
        call.call_no: await _record_said(step, call, claim, answer)
        for (call, claim), answer in zip(unknown, answers, strict=True)
        if answer.decision != "did_not_run"
    }
    return [(call, said.get(call.call_no, claim)) for call, claim in claims]


async def _is_unknown(step: Step, call: Call, claim: Claim) -> bool:
    if claim.result is not None or not claim.runs or call.effect != "unsafe":
        return False
    if claim.sandbox_id == OUTSIDE:
        return True
    sandbox_id, _ = await step.box(claim.snapshot_before)
    return claim.sandbox_id != sandbox_id  # the journal of the sandbox that it began in would tell


async def _record_said(step: Step, call: Call, claim: Claim, answer: Answer) -> Claim:
    """A call of which a person knows how it ended."""
    facts = {"told": True}
    if answer.decision == "ran":
        outcome = Outcome("exit", 0, str(answer.answer.get("output") or "").encode(), facts=facts)
    else:
        reason = str(answer.answer.get("reason") or "nobody knows whether it took effect, and it is not run again")
        outcome = Outcome("refused", None, reason.encode(), facts=facts)
    return await record(step, call, claim, outcome, claim.snapshot_before)


async def _settled(step: Step, call: Call, claim: Claim, limit: asyncio.Semaphore) -> Claim:
    if claim.result is not None:
        return claim
    async with limit:
        try:
            known = step.tools.find(call.name)
            check(step.services.egress, known, call.arguments)
            known = await step.ready(known)
        except (BadArguments, InvalidRequest, EgressRefused, Unopened) as refused:
            # The model asked for something that is no call; it is told so and may do better.
            return await record(step, call, claim, Outcome.refused(str(refused)), claim.snapshot_before)
        return await (_outside if known.outside else _inside)(step, known, call, claim)


async def _outside(step: Step, known: Known, call: Call, claim: Claim) -> Claim:
    await ledger.note_run(step.services.db, step.owner, step.attempt, call, claim.runs + 1, OUTSIDE)
    place = step.place(call, known, again=False)
    if isinstance(known.declared, SessionTool):
        task = str(call.arguments.get("task") or "")
        outcome = await run_child(
            step.services, step.child(call), step.config, known.declared, task, place.timeout_s, place.output_bytes
        )
    else:
        outcome = await run_outside(step.services.egress, known, call.arguments, place)
    return await record(step, call, claim, outcome, claim.snapshot_before)


async def _inside(step: Step, known: Known, call: Call, claim: Claim) -> Claim:
    s = step.services
    sandbox_id, sandbox = await step.box(claim.snapshot_before)
    again = claim.runs > 0 and claim.sandbox_id == sandbox_id and not claim.begins  # its journal runs a key once
    if not again and not claim.begins:
        await ledger.note_run(s.db, step.owner, step.attempt, call, claim.runs + 1, sandbox_id)
    outcome = await run_inside(sandbox, known, call.arguments, step.place(call, known, again=again))
    await step.way_out.tell()
    async with s.blob_lock:
        after = claim.snapshot_before
        if known.writes:
            after = taken = await sandbox.snapshot(s.blobs)
            outcome = outcome.noting(taken.left_out)
        return await record(step, call, claim, outcome, after)


async def record(step: Step, call: Call, claim: Claim, outcome: Outcome, after: str) -> Claim:
    outcome = _clean(step, outcome)
    result: dict[str, Any] = outcome.as_result()
    await ledger.settle(step.services.db, step.owner, step.attempt, call, result, outcome.output, after)
    return Claim(result, outcome.output, claim.snapshot_before, after, claim.runs, claim.sandbox_id)


def _clean(step: Step, outcome: Outcome) -> Outcome:
    """Without the secrets of every tool: what runs in a sandbox can look into the processes of another tool there."""
    redactor = step.values.redactor
    cut_at = step.config.limits.tool_output_bytes if outcome.truncated else None
    output = redactor.of_bytes(outcome.output, cut_at=cut_at)
    return Outcome(outcome.reason, outcome.code, output, outcome.truncated, redactor.json(outcome.facts or {}))


async def interrupt_call(step: Step, call: Call, claim: Claim) -> Claim:
    """A call of a turn that was stopped: dead before this returns, and told as that."""
    s = step.services
    if not claim.runs:
        return await record(step, call, claim, Outcome("interrupted", None, b"it had not begun"), claim.snapshot_before)
    known = step.tools.get(call.name)
    if known is not None and isinstance(known.declared, SessionTool):
        await end_child(s, step.child(call), "cancelled")
        stopped = Outcome("interrupted", None, b"the session that was to do it was cancelled")
        return await record(step, call, claim, stopped, claim.snapshot_before)
    if known is not None and claim.sandbox_id != OUTSIDE:
        sandbox_id, sandbox = await step.box(claim.snapshot_before)
        if sandbox_id == claim.sandbox_id:
            await stop_inside(sandbox, known, step.place(call, known, again=True))
            async with s.blob_lock:
                after = await sandbox.snapshot(s.blobs) if known.writes else claim.snapshot_before
                stopped = Outcome("interrupted", None, b"it was stopped; what it did until then stays")
                return await record(step, call, claim, stopped, after)
    stopped = Outcome("interrupted", None, b"it was stopped; it may have taken effect")
    return await record(step, call, claim, stopped, claim.snapshot_before)
