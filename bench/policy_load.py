"""What the simulated sessions do: recorded shapes, published mixes of tool durations, recorded chat traffic.

A mix is a handful of tools, each with a weight, a lognormal duration (median, sigma) and a timeout. They are made up,
and said so: the recordings have few durations and short ones. Sessions are drawn from the lengths of recorded ones.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.policy import State

DATA = Path(__file__).parent / "data"
CONTEXT_TOKENS = 8192
NEVER_S = 1e9
SCALES = (0.6, 1.6)
"""A session is a recorded one with its turns longer or shorter by a factor between these."""


@dataclass(frozen=True)
class Tool:
    name: str
    weight: float
    median_s: float
    sigma: float
    timeout_s: float
    state: State = State.TOOL

    def draw(self, rng: random.Random) -> float:
        return min(self.median_s * math.exp(rng.gauss(0.0, self.sigma)), self.timeout_s)


MIXES: dict[str, tuple[Tool, ...]] = {
    # median 1 s
    "short": (
        Tool("list", 0.40, 0.6, 0.6, 120.0),
        Tool("edit", 0.35, 1.0, 0.6, 120.0),
        Tool("run", 0.25, 2.5, 0.8, 120.0),
    ),
    # median 5 s, p90 60 s, p99 600 s
    "mixed": (
        Tool("edit", 0.40, 1.5, 0.8, 120.0),
        Tool("test", 0.45, 10.0, 1.0, 600.0),
        Tool("build", 0.15, 90.0, 1.25, 1800.0),
    ),
    # minutes to hours, a person answers
    "human": (
        Tool("reply", 0.60, 300.0, 1.0, 86400.0, State.APPROVAL),
        Tool("review", 0.40, 2400.0, 1.1, 86400.0, State.APPROVAL),
    ),
}


@functools.cache
def mean_pause_s(mix: str) -> float:
    rng = random.Random(0)
    return sum(tool.weight * sum(tool.draw(rng) for _ in range(5000)) / 5000 for tool in MIXES[mix])


@dataclass(frozen=True)
class Turn:
    """A think and the pause after it. `new_tokens` come in, `out_tokens` are decoded; `last` closes the session."""

    new_tokens: int
    out_tokens: int
    tool: str
    pause_s: float
    timeout_s: float | None
    state: State
    last: bool = False


@functools.cache
def shapes() -> list[tuple[int, list[tuple[int, int]]]]:
    """(prompt tokens, [(assistant tokens, tool result tokens)]) of each recorded session."""
    rows = [json.loads(line) for line in (DATA / "agent-shapes.jsonl").read_text().splitlines()]
    return [(row["prompt"], [(out, result) for out, result in row["turns"]]) for row in rows]


def sessions(seed: str, mix: tuple[Tool, ...]) -> Iterator[list[Turn]]:
    """Sessions without end, one after another in one slot; the same for the same seed, whatever the policy."""
    rng = random.Random(seed)
    recorded = shapes()
    weights = [tool.weight for tool in mix]
    while True:
        prompt, steps = rng.choice(recorded)
        scale = rng.uniform(*SCALES)
        turns: list[Turn] = []
        new, total = int(prompt * scale), 0
        for out, result in steps:
            out, result = max(8, int(out * scale)), max(8, int(result * scale))
            if total + new + out + result > CONTEXT_TOKENS:
                break
            tool = rng.choices(mix, weights)[0]
            turns.append(Turn(new, out, tool.name, tool.draw(rng), tool.timeout_s, tool.state))
            total += new + out
            new = result
        yield [*turns, Turn(new, 8, "", 0.0, None, State.RUNNING, last=True)]


@dataclass(frozen=True)
class Arrival:
    """One conversation of the chat traffic: when it begins, and its turns."""

    at_s: float
    turns: list[Turn]


def conversations(recording: Path, shrink: int = 4) -> list[Arrival]:
    """Recorded chat traffic, as chains of requests that extend one another's prefix.

    recording: a JSON object per line with timestamp (ms), input_length and output_length (tokens) and hash_ids, one per
    512-token block of the prefix, as in the trace release of Mooncake (FAST 2025). Lengths are divided by `shrink`, so
    that the longest fits a small model. A gap is from request to request. Nobody says that a conversation is over: the
    person just never comes back.
    """
    rows = _extending([json.loads(line) for line in recording.read_text().splitlines()])
    child: dict[int, int] = {}
    for index, row in enumerate(rows):
        if row[3] >= 0:
            child.setdefault(row[3], index)
    taken = set(child.values())
    return [_chain(rows, child, index, shrink) for index in range(len(rows)) if index not in taken]


def _extending(requests: list[dict[str, Any]]) -> list[list[int]]:
    """(time in ms, input tokens, output tokens, the latest earlier request with whose blocks it begins, or -1)."""
    latest: dict[tuple[int, ...], int] = {}
    rows = []
    for index, request in enumerate(requests):
        ids = tuple(request["hash_ids"])
        longest = next((k for k in range(len(ids), 0, -1) if ids[:k] in latest), 0)
        before = latest[ids[:longest]] if longest else -1
        rows.append([request["timestamp"], request["input_length"], request["output_length"], before])
        if len(ids) > 1:
            latest[ids[:-1]] = index
    return rows


def _chain(rows: list[list[int]], child: dict[int, int], index: int, shrink: int) -> Arrival:
    at_s, turns, held = rows[index][0] / 1000, [], 0
    while True:
        when, length, out = rows[index][:3]
        new = max(8, min(length // shrink, CONTEXT_TOKENS - 512) - held)
        out = max(1, min(out // shrink, 256))
        held += new + out
        following = child.get(index)
        if following is None or held > CONTEXT_TOKENS - 512:
            turns.append(Turn(new, out, "person", NEVER_S, None, State.PAUSED))
            return Arrival(at_s, [*turns, Turn(8, 8, "", 0.0, None, State.RUNNING, last=True)])
        gap_s = max((rows[following][0] - when) / 1000, 0.1)
        turns.append(Turn(new, out, "person", gap_s, None, State.PAUSED))
        index = following
