"""Whether the record in an archive is one that sessions have: its steps, its tokens, and what steps said."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

from pydantic import Field, ValidationError

from runtime.archive_shapes import CheckpointRow, Int4, Json, Name, Segments, StepRow, Strict
from runtime.archives import Archive
from runtime.errors import InvalidRequest


class Loose(Strict, extra="ignore"):
    """What of a step's output the next step goes by."""


class Options(Loose):
    tool_choice: Name = "auto"
    max_tool_rounds: Int4 = 0


class Said(Loose):
    name: Name
    arguments: Json


class AfterStep(Loose):
    kind: Name
    outcome: Name


class InputOutput(Loose):
    outcome: Name
    options: Options = Options()


class ThinkOutput(Loose):
    outcome: Name
    calls: list[Said] = Field(default=[], max_length=1000)
    complaint: str = ""


class ToolOutput(Loose):
    outcome: Name


class OtherOutput(Loose):
    after: AfterStep


_OUTPUTS: Mapping[str, type[Loose]] = {
    "input": InputOutput,
    "think": ThinkOutput,
    "tool": ToolOutput,
    "decision": OtherOutput,
    "compaction": OtherOutput,
}


def chain_of(archive: Archive) -> list[StepRow]:
    """The steps that led to the last checkpoint, first to last. Raises InvalidRequest."""
    by_number = {one.step: one for one in archive.steps if one.live and one.state == "completed"}
    if len({one.step for one in archive.steps}) != len(archive.steps):
        raise InvalidRequest("the archive's record has a step twice")
    last = max((one.step for one in archive.checkpoints if one.step in by_number), default=None)
    if last is None:
        raise InvalidRequest("the archive's session has no checkpoint: there is nothing to go on from")
    chain: list[StepRow] = []
    number: int | None = last
    while number is not None:
        step = by_number.get(number)
        if step is None or (chain and step.step >= chain[-1].step):
            raise InvalidRequest(f"the archive's record does not have step {number}, which another one goes on from")
        chain.append(step)
        number = step.parent
    chain.reverse()
    for step in chain:
        _check_output(step)
    return chain


def _check_output(step: StepRow) -> None:
    try:
        _OUTPUTS[step.kind].model_validate(step.output or {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(
            f"the archive's step {step.step} says what no step says: {where}: {first['msg']}"
        ) from None


def branch_of(archive: Archive, chain: Sequence[StepRow], vocabulary: int) -> list[int]:
    """The transcript's token ids, which the checkpoints agree with. Raises InvalidRequest."""
    by_step: dict[int, list[Segments]] = {}
    for segment in archive.segments:
        by_step.setdefault(segment.step, []).append(segment)
    checkpoints = {one.step: one for one in archive.checkpoints}
    if len(checkpoints) != len(archive.checkpoints):
        raise InvalidRequest("the archive's record has a checkpoint twice")
    tokens: list[int] = []
    for step in chain:
        own = by_step.get(step.step, [])
        if [one.idx for one in own] != list(range(len(own))):
            raise InvalidRequest(f"the archive's transcript of step {step.step} is not whole")
        if step.kind == "compaction" and step.token_start <= len(tokens):
            del tokens[step.token_start :]
        added = [token for one in own for token in one.token_ids]
        if step.token_start != len(tokens) or step.token_count != len(added):
            raise InvalidRequest(f"the archive's transcript of step {step.step} has not the tokens that the step tells")
        tokens += added
        if (checkpoint := checkpoints.get(step.step)) is not None:
            _check_digest(checkpoint, tokens)
    if any(token >= vocabulary for token in tokens):
        raise InvalidRequest(f"the archive's transcript has a token that the model does not: there are {vocabulary}")
    return tokens


def _check_digest(checkpoint: CheckpointRow, tokens: Sequence[int]) -> None:
    digest = hashlib.sha256(array("I", tokens).tobytes()).hexdigest()
    told = (checkpoint.tokens, checkpoint.sampler_pos, checkpoint.token_digest)
    if told != (len(tokens), len(tokens), digest):
        raise InvalidRequest(
            f"the archive's checkpoint of step {checkpoint.step} names other tokens than its transcript"
        )
