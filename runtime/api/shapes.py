"""What routes of sessions answer with."""

from __future__ import annotations

import datetime
from typing import Any, Literal

from pydantic import ConfigDict, Field

from runtime.api.documented import Shape
from runtime.config import Approval, KvPolicy, Limits, OnBusy
from runtime.generation import ResponseFormat, Sampling
from workflows.states import State

StepKind = Literal["input", "think", "tool", "decision", "compaction"]
_SESSION: dict[str, Any] = {
    "id": "ses_5f0c2a91d3e84b67",
    "object": "session",
    "state": "idle",
    "model": "qwen2.5-coder-0.5b-instruct",
    "tools": ["bash"],
    "seed": 7,
    "epoch": 1,
    "tokens": 212,
    "last_event": 41,
}


class BudgetOut(Shape):
    """Limits as they stand now; null: any amount."""

    tokens: int | None = None
    steps: int | None = None
    wall_s: float | None = None
    tool_s: float | None = None
    warn_at: float = 0.8


class Spent(Shape):
    """What the session has used: tokens sampled, steps, seconds of tools, seconds of thinking and tools."""

    tokens: int
    steps: int
    tool_s: float
    wall_s: float


class Branch(Shape):
    session_id: str
    step: int | None


class AgentRef(Shape):
    name: str
    version: int


class SessionRow(Shape):
    """How a session stands, and what it was made of. Secrets of its tools are shown as ***."""

    id: str
    object: Literal["session"]
    state: State
    waiting_for: Literal["approval", "outcome", "client_tool", "budget"] | None
    ending: Literal["cancelled", "completed"] | None = Field(description="From when that was asked for.")
    model: str
    system: str | None
    tools: list[str | dict[str, Any]]
    image: str | None
    egress: list[str]
    limits: Limits
    sampling: Sampling
    response_format: ResponseFormat | None
    parallel_tool_calls: bool | None
    kv: KvPolicy
    approvals: dict[str, Approval]
    on_busy: OnBusy
    context_policy: Literal["fail", "drop_tool_output", "summarise"]
    budget: BudgetOut
    spent: Spent
    agent: AgentRef | None = Field(description="What it was made of.")
    schedule: str | None = Field(description="The schedule that made it.")
    metadata: dict[str, str]
    parent: str | None = Field(description="The session that this one runs for as a tool.")
    forked_from: Branch | None
    seed: int
    epoch: int = Field(description="Rises whenever the session is placed anew; an earlier holder can write nothing.")
    node: str | None
    error: dict[str, Any] | None
    last_event: int
    created_at: datetime.datetime
    updated_at: datetime.datetime


class SessionOut(SessionRow):
    """A session, and how long its transcript is."""

    model_config = ConfigDict(json_schema_extra={"examples": [_SESSION]})

    tokens: int = Field(description="Of the transcript, as of the last checkpoint.")


class CommandOut(SessionOut):
    """The session, and the command that it was given: an event names it once it is applied or refused."""

    command: str


class MessageOut(Shape):
    """A message that is never lost from now on. An event `step.started` names it when it is taken."""

    id: str
    object: Literal["message"] = "message"
    session_id: str


class EventOut(Shape):
    """One event of the log. Its id is its position: a cursor, and the `Last-Event-ID` of the stream."""

    id: int
    type: str
    created_at: datetime.datetime
    data: dict[str, Any]
    step: int | None = None
    attempt: int | None = None


class StepOut(Shape):
    id: int
    object: Literal["step"]
    kind: StepKind
    state: Literal["running", "completed", "failed", "cancelled"]
    live: bool = Field(description="Whether it is on the branch that the session is on.")
    parent: int | None
    attempts: int
    token_start: int
    token_count: int
    output: Any
    error: Any
    started_at: datetime.datetime
    ended_at: datetime.datetime | None


class AttemptOut(Shape):
    """One try at a step. `resumed_at`: durable tokens of the step when it began."""

    id: str
    object: Literal["attempt"]
    step: int
    attempt: int
    epoch: int
    node: str
    resumed_at: int
    outcome: Literal["running", "completed", "failed", "lost", "cancelled", "waiting", "paused"]
    error: Any
    started_at: datetime.datetime
    ended_at: datetime.datetime | None


class KvKeys(Shape):
    """Which pages a checkpoint names: the key of the last one commits to all before it."""

    group: int
    shard: int
    shards: int
    tail: str | None
    new_pages: int


class CheckpointOut(Shape):
    """What a session is resumed, forked or rewound from."""

    id: int
    object: Literal["checkpoint"]
    kind: StepKind
    live: bool
    parent: int | None
    tokens: int
    token_digest: str
    seed: int
    sampler_pos: int
    fingerprint: str
    kv: KvKeys
    ledger_pos: int
    workspace_root: str
    created_at: datetime.datetime


class SegmentOut(Shape):
    id: int
    step: int
    kind: Literal["scaffold", "message", "model", "tool"]
    token_ids: list[int]


class KvOut(Shape):
    """Where the session's KV was last seen."""

    object: Literal["kv"]
    tier: str
    detail: dict[str, Any]
    updated_at: datetime.datetime | None


class DecisionOut(Shape):
    """What was decided about pages: what it was expected to cost, what it cost, and what the other way would have."""

    id: str
    object: Literal["kv.decision"]
    step: int = Field(description="0: not asked for by a step of this session.")
    decided_at: datetime.datetime
    reason: str
    action: str
    place: str
    tokens: int
    bytes: int
    predicted_s: float | None
    realised_s: float | None
    instead_s: float | None
    status: str
    detail: str


class QuestionOut(Shape):
    """What a session waits for."""

    id: str
    object: Literal["approval"]
    kind: Literal["approval", "outcome", "client_tool", "budget"]
    session_id: str
    step: int
    call: int | None
    about: dict[str, Any]
    state: Literal["open", "answered", "expired", "void"]
    answer: dict[str, Any] | None
    expires_at: datetime.datetime | None
    created_at: datetime.datetime
    answered_at: datetime.datetime | None
