"""Values that the store takes and gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Owner:
    """Who writes: a node in one of its lives, holding the session at one epoch. Every write is fenced by it."""

    session_id: str
    epoch: int
    node_id: str
    node_boot: str


@dataclass(frozen=True)
class Session:
    session_id: str
    tenant_id: str
    state: str
    config: Mapping[str, Any]
    seed: int
    epoch: int
    salt: bytes  # of the tenant; part of every page key
    waiting_for: str | None = None
    budget: Mapping[str, Any] = field(default_factory=dict)  # limits as they stand now
    spent: Mapping[str, float] = field(default_factory=dict)  # by the same names
    warned: Sequence[str] = ()


@dataclass(frozen=True)
class Event:
    type: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    kind: str  # scaffold, message, model or tool
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens of a step, after `offset` others, and the text that they show. `logprobs`: one for each token,
    where they were asked for; `calls`: names and arguments of calls in the text, as far as they were written."""

    offset: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[Mapping[str, Any]] | None = None
    calls: Sequence[Mapping[str, Any]] = ()

    @property
    def event(self) -> Event:
        told: dict[str, Any] = {"text": self.text, "token_ids": list(self.token_ids), "offset": self.offset}
        if self.logprobs is not None:
            told["logprobs"] = list(self.logprobs)
        if self.calls:
            told["calls"] = list(self.calls)
        return Event("model.delta", told)


@dataclass(frozen=True)
class Attempt:
    """One execution of a step. `done` is the step's output if it had already completed; `held` says that it may not
    begin now, since the session is paused or waits."""

    session: Session
    step_no: int
    attempt_no: int
    token_start: int
    durable: tuple[Segment, ...]
    done: Mapping[str, Any] | None
    held: bool = False

    @property
    def model_tokens(self) -> list[int]:
        """The tokens of this step that were sampled and are durable."""
        return [t for segment in self.durable if segment.kind == "model" for t in segment.token_ids]


@dataclass(frozen=True)
class Checkpoint:
    """What a step leaves behind, by logical name only: nothing here says where bytes lie."""

    token_count: int
    token_digest: bytes
    fingerprint: str
    kv_tail: bytes | None
    kv_new: Sequence[bytes]
    workspace_root: str
    kv_group: int = 0
    kv_shard: int = 0
    kv_shards: int = 1
