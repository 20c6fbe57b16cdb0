"""A context that fills up: what gives way, by the session's `context_policy`.

A compaction is a step: it replaces the transcript from some position on, ends in a checkpoint and can be rewound. What
stands before that position keeps its KV, so the position is as late as the room that is needed allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import Done, Prefill, Sampling, Tokens
from engine.tokens import ToolResult
from runtime.config import SessionConfig
from runtime.steps import checkpoints
from runtime.steps.generating import counted_elsewhere
from runtime.steps.measuring import Measure, measure
from runtime.steps.services import Services
from runtime.store import sessions, standing, steps
from runtime.store.values import Attempt, Event, Owner, Segment
from workflows.contract import Progress, StepIn
from workflows.policies import Next, next_action
from workflows.states import Event as Move

WARN_AT = 0.8
GOAL = 0.5  # of the context, after a compaction
DROPPED = "[this output was dropped to make room; call the tool again if it is needed]"
ASK = (
    "The conversation is becoming too long. Write down, in your own words and as briefly as possible, what a colleague"
    " must know to go on with the task: what was asked, what was found out, what was done, what is left."
)
TOLD = "What happened so far, in brief:\n\n{}\n\nGo on from there."
Branch = Sequence[tuple[int, str, list[int]]]  # step, kind, token ids


@dataclass(frozen=True)
class Compacted:
    """The transcript from position `start` on. `dropped`: outputs that gave way; `sampled`: tokens that it cost;
    `account`: what else the engine says of them, as of a think."""

    start: int
    segments: tuple[Segment, ...]
    dropped: int = 0
    sampled: int = 0
    account: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.start + sum(len(segment.token_ids) for segment in self.segments)


def reserve(limits_think_tokens: int, measured: Measure) -> int:
    """Room that a think should find: for what it may say, and a little more for a compaction's own question."""
    context = measured.context
    return min(measured.of(limits_think_tokens), context // 4) + context // 16


def is_full(measured: Measure, config: Mapping[str, Any], tokens: int, at: Progress) -> bool:
    """Whether the next think needs room that is not there. Never twice in a row: a compaction does what it can."""
    if config.get("context_policy", "fail") == "fail" or at.compacted:
        return False
    if next_action(at) is not Next.THINK:
        return False
    return tokens + reserve(config["limits"]["max_think_tokens"], measured) > measured.context


def warning(measured: Measure, before: int, after: int) -> list[Event]:
    """Said once, by the step with which the transcript passed WARN_AT of its context."""
    if before < WARN_AT * measured.context <= after:
        told = {"tokens": measured.tokens(after), "context_length": measured.length}
        return [Event("context.warning", told if measured.exact else {**told, "estimated": True})]
    return []


async def compact(s: Services, what: StepIn, execution: str) -> None:
    """Where nothing is left that could give way, the step says so and changes nothing: what comes next uses the room
    that there is, and refuses in a sentence where there is none."""
    session = await sessions.get(s.db, what.session_id)
    config = SessionConfig.model_validate(session.config)
    owner = s.owner(what.session_id, what.epoch)
    attempt = await steps.begin(s.db, owner, what.step_no, "compaction", Move.THINK, token=execution)
    if attempt.done is not None or attempt.held:
        return
    before = await steps.branch(s.db, what.session_id, what.step_no)
    size = _size(before)
    measured = await measure(s, what.session_id)
    at = await s.db.run(lambda c: standing.progress(c, what.session_id))
    compacted: Compacted | None
    if config.context_policy == "summarise":
        turn = _last_turn(before) if next_action(at) is not Next.REST else ()
        compacted = await _summarised(s, owner, attempt, before, turn, measured)
    else:
        goal = int(GOAL * measured.context)
        compacted = dropped(before, goal, lambda calls: _emptied(s, calls), await _call_counts(s, what))
    if compacted is None or compacted.tokens >= size:
        cost = (compacted.sampled, compacted.account) if compacted else (0, {})
        compacted = Compacted(size, (), 0, *cost)
    await _complete(s, owner, attempt, before, compacted, config.context_policy, at)


async def _complete(
    s: Services, owner: Owner, attempt: Attempt, before: Branch, compacted: Compacted, policy: str, at: Progress
) -> None:
    tokens = [token for _, _, ids in before for token in ids]
    after = [*tokens[: compacted.start], *(t for segment in compacted.segments for t in segment.token_ids)]
    about = {"policy": policy, "from": len(tokens), "to": len(after), "kept": compacted.start}
    root, tail = await checkpoints.last(s.db, owner.session_id)
    await steps.complete(
        s.db,
        owner,
        attempt,
        segments=compacted.segments,
        output={
            "outcome": "compacted",
            "dropped": compacted.dropped,
            "sampled": compacted.sampled,
            **compacted.account,
            "after": {"kind": at.kind, "outcome": at.outcome},
            **about,
        },
        checkpoint=checkpoints.carried(s.engine.card, after, root, tail),
        notes=[Event("context.compacted", about)],
        token_start=compacted.start,
        sampled=compacted.sampled,
    )


def dropped(
    before: Branch, goal: int, emptied: Callable[[int], list[int]], calls: Mapping[int, int]
) -> Compacted | None:
    """Tool outputs give way until at most `goal` tokens are left: the latest ones that suffice, but never the last,
    which the next think is about. None: there is none. `emptied(n)`: tokens that stand for n results."""
    outputs = [i for i, (_, kind, _) in enumerate(before) if kind == "tool"][:-1]
    size = _size(before)
    chosen: dict[int, list[int]] = {}
    for i in reversed(outputs):
        step_no, _, ids = before[i]
        short = emptied(calls.get(step_no, 1))
        if len(short) < len(ids):
            chosen[i] = short
            size -= len(ids) - len(short)
        if size <= goal:
            break
    if not chosen:
        return None
    first = min(chosen)
    rest = [(no, kind, chosen.get(i, ids)) for i, (no, kind, ids) in enumerate(before) if i >= first]
    return Compacted(_size(before[:first]), tuple(joined(rest)), len(chosen))


def _emptied(s: Services, calls: int) -> list[int]:
    return s.chat.tool_results([ToolResult(f"call_{i}", "dropped", DROPPED) for i in range(max(1, calls))])


async def _call_counts(s: Services, what: StepIn) -> dict[int, int]:
    rows = await s.db.fetch(
        "SELECT step_no, (output ->> 'calls')::int AS calls FROM steps"
        " WHERE session_id = $1 AND kind = 'tool' AND state = 'completed'",
        what.session_id,
    )
    return {row["step_no"]: row["calls"] or 1 for row in rows}


async def _summarised(
    s: Services, owner: Owner, attempt: Attempt, before: Branch, turn: Branch, measured: Measure
) -> Compacted:
    """The opening, what the model itself says of the rest, and the turn that goes on."""
    context = measured.context
    opening = len(before[0][2]) if before and before[0][1] == "scaffold" else 0
    question = [*s.chat.user(ASK), *s.chat.assistant_open()]
    length = min(512, measured.length // 8)
    room = context - measured.of(length) - len(question)
    tokens = [token for _, _, ids in before for token in ids]
    sampled, account = await _generate(s, owner, attempt, [*tokens[:room], *question], length)
    summary = s.chat.parse_assistant(sampled, tools=()).text.strip()
    counted = account["usage"]["completion_tokens"] if "usage" in account else len(sampled)
    if not summary:
        return Compacted(_size(before), (), 0, counted, account)
    told = s.chat.user(TOLD.format(summary))
    room = int(GOAL * context) - opening - len(told)
    kept = turn if _size(turn) <= room else last_round(turn)
    return Compacted(opening, (Segment("message", told), *joined(kept)), 0, counted, account)


def _size(branch: Branch) -> int:
    return sum(len(ids) for _, _, ids in branch)


def last_round(turn: Branch) -> Branch:
    """What the turn is about, and the last think with its results: the least that the next one can go on from."""
    models = [i for i, (_, kind, _) in enumerate(turn) if kind == "model"]
    if not models:
        return turn
    first = models[-1]
    while first > 1 and turn[first - 1][1] in ("model", "scaffold") and turn[first - 1][0] == turn[first][0]:
        first -= 1
    return [*turn[:1], *turn[first:]] if first > 0 else turn


def joined(branch: Branch) -> list[Segment]:
    """Neighbours of one kind as one segment."""
    found: list[Segment] = []
    for _, kind, ids in branch:
        if found and found[-1].kind == kind:
            found[-1] = Segment(kind, [*found[-1].token_ids, *ids])
        else:
            found.append(Segment(kind, ids))
    return found


def _last_turn(before: Branch) -> Branch:
    """From the last message of the user on, where something was said to it already; else nothing."""
    inputs = [i for i, (_, kind, _) in enumerate(before) if kind == "message"]
    return before[inputs[-1] :] if inputs else ()


async def _generate(
    s: Services, owner: Owner, attempt: Attempt, prompt: list[int], length: int
) -> tuple[list[int], dict[str, Any]]:
    """What is sampled, and the engine's account of it."""
    await s.coming_back.asked(owner.session_id)
    client = await s.engine.client()
    sampled: list[int] = []
    account: dict[str, Any] = {}
    async for event in client.generate(
        request_id=f"{owner.session_id}/{attempt.step_no}/{attempt.attempt_no}",
        session=owner.session_id,
        epoch=owner.epoch,
        token_ids=prompt,
        max_tokens=length,
        sampling=Sampling(0.0, 0, 1.0, attempt.session.seed),
        salt=attempt.session.salt,
    ):
        if isinstance(event, Tokens):
            sampled.extend(event.ids)
        elif isinstance(event, Prefill):
            account["kv"] = dataclasses.asdict(event)
        elif isinstance(event, Done):
            account |= {"prefill_ms": event.prefill_ms, "decode_ms": event.decode_ms}
            account |= counted_elsewhere(event) if event.usage is not None else {}
            break
    return sampled, account
