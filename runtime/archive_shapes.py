"""The records of a session's archive, strictly: what is not as it must be is refused before anything is made of it."""

from __future__ import annotations

import base64
import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Int4 = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(max_length=500)]


def _is_a_time(text: str) -> str:
    datetime.datetime.fromisoformat(text)
    return text


def _is_base64(text: str) -> str:
    base64.b64decode(text, validate=True)
    return text


Time = Annotated[str, Field(max_length=60), AfterValidator(_is_a_time)]
Bytes = Annotated[str, AfterValidator(_is_base64)]
Json = dict[str, Any]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Member(Strict):
    name: Name
    size: Annotated[int, Field(ge=0, lt=2**40)]
    sha256: Sha256


class Manifest(Strict):
    format: Int4
    members: list[Member]


class Model(Strict):
    """What computed the tokens: an archive goes on only where the same is served."""

    name: Name
    fingerprint: Name
    tokenizer: Name


class SessionFile(Strict):
    """`config` has no secrets; `secrets` are the places of those that it is missing."""

    format: Int4
    id: Name
    state: Name
    created_at: Name
    exported_at: Name
    release: Name
    model: Model
    seed: Seed
    config: Json
    secrets: list[Name]
    listings: Json | None
    budget: Json | None
    spent: Json
    snapshots: Literal["last", "all"]
    kv: Literal["not included"]


class Segments(Strict):
    """Token ids are the truth; the text is for people."""

    step: Number
    idx: Int4
    kind: Literal["scaffold", "message", "model", "tool"]
    token_ids: list[Int4]
    text: str | None


class StepRow(Strict):
    step: Number
    parent: Number | None
    kind: Literal["input", "think", "tool", "decision", "compaction"]
    state: Literal["running", "completed", "failed", "cancelled"]
    live: bool
    token_start: Int4
    token_count: Int4
    attempts: Int4
    output: Json | None
    error: Json | None
    started_at: Time
    ended_at: Time | None


class CallRow(Strict):
    step: Number
    call: Int4
    name: Name
    arguments: Json
    effect: Literal["pure", "sandboxed", "idempotent", "unsafe"]
    status: Literal["pending", "settled", "outcome_unknown"]
    runs: Int4
    result: Json | None
    output: Bytes | None


class CheckpointRow(Strict):
    step: Number
    tokens: Int4
    token_digest: Sha256
    seed: Seed
    sampler_pos: Int4
    fingerprint: Name
    ledger_pos: Int4
    workspace_root: Sha256
