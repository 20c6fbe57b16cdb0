"""Recorded agent sessions as lengths and pauses, and token ids for them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.policy_load import MIXES, shapes

FRAME_TOKENS = 4  # around each message, as in bench/data
ANSWER_TOKENS = 4
_IDS = (1_000, 40_000)  # no special tokens
_REPEATED = 48
_MIX = MIXES["mixed"]


@dataclass(frozen=True)
class Step:
    """A think of `out` tokens, then a tool that takes `pause_s` and says `result` tokens."""

    out: int
    result: int
    pause_s: float


@dataclass(frozen=True)
class Recorded:
    name: str
    prompt: int
    steps: tuple[Step, ...]

    def cut(self, turns: int, context: int) -> Recorded:
        """At most so many steps, and no more than fit a context with another think behind them."""
        kept: list[Step] = []
        total = self.prompt
        for step in self.steps[:turns]:
            total += step.out + step.result
            if total + ANSWER_TOKENS > context:
                break
            kept.append(step)
        return replace(self, steps=tuple(kept))


def from_shapes() -> list[Recorded]:
    """Those of bench/data, which has no durations: they are drawn from the simulation's mix of tools."""
    found = []
    for number, (prompt, turns) in enumerate(shapes()):
        name = f"s{number}"
        steps = (Step(out, result, _drawn_s(name, turn)) for turn, (out, result) in enumerate(turns))
        found.append(Recorded(name, prompt, tuple(steps)))
    return found


def from_trace(path: Path, count: Callable[[str], int]) -> list[Recorded]:
    """Sessions of a recording: a JSON object per line with `id`, `messages` (role, content) and `tool_seconds`, one per
    tool call, null where it is not known; those are drawn."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [_session(row, lambda text: count(text) + FRAME_TOKENS) for row in rows]


def _session(row: dict[str, Any], count: Callable[[str], int]) -> Recorded:
    prompt, turns = 0, list[list[int]]()
    for message in row["messages"]:
        tokens = count(message["content"])
        if message["role"] == "assistant":
            turns.append([tokens, 0])
        elif turns:
            turns[-1][1] += tokens
        else:
            prompt += tokens
    known_s = [*row["tool_seconds"], *[None] * len(turns)]
    steps = (
        Step(out, result, _drawn_s(row["id"], turn) if known_s[turn] is None else known_s[turn])
        for turn, (out, result) in enumerate(turns)
        if result  # the last message of a session has no tool behind it
    )
    return Recorded(row["id"], prompt, tuple(steps))


def _drawn_s(name: str, turn: int) -> float:
    draw = random.Random(f"{name} {turn}")
    return draw.choices(_MIX, [tool.weight for tool in _MIX])[0].draw(draw)


def drawn(name: str, count: int) -> list[int]:
    """Token ids without meaning, the same for the same name."""
    draw = random.Random(name)
    return [draw.randrange(*_IDS) for _ in range(count)]


def result_after(transcript: Sequence[int], name: str, count: int) -> list[int]:
    """A tool result that ends with a piece of the transcript, so that the next tokens depend on what is far back."""
    repeated = min(_REPEATED, count, len(transcript) // 2)
    at = random.Random(f"piece {name}").randrange(len(transcript) - repeated - ANSWER_TOKENS)
    return drawn(name, count - repeated) + list(transcript[at : at + repeated])
