"""Which faults there are, and a plan of them for each session that a seed decides: what breaks, when, for how long."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

PROCESSES = ("node", "engine", "worker", "api", "temporal", "postgres")
CUTS = ("node-postgres", "node-temporal", "api-postgres")
DISKS = ("blobs", "kv", "home")
TARGETS = {
    "kill": (*PROCESSES, "sandbox", "dockerd"),
    "stop": PROCESSES,
    "full": DISKS,
    "cut": CUTS,
}
WEIGHTS = {"kill": 14, "stop": 2, "full": 2, "cut": 4}
MOMENTS = ("think", "tool", "snapshot", "restore", "between", "idle")
TOOL_S = (0.5, 2.0, 0.5)
HEARTBEAT_S = 5.0


@dataclass(frozen=True)
class Fault:
    """What happens to `target` at the `nth` `moment`, `after` tokens of a think or seconds of anything else.

    `for_s`: how long a stop, a full disk or a cut lasts. `pick` (0 to 1) chooses among several processes of one kind.
    """

    kind: str
    target: str
    moment: str
    nth: int
    after: float
    for_s: float
    pick: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}"

    def describe(self) -> str:
        unit = f"{self.after:.0f} tokens" if self.moment == "think" else f"{self.after:.2f} s"
        lasting = f" for {self.for_s:.1f} s" if self.for_s else ""
        return f"{self.name}{lasting}, {self.moment} {self.nth} after {unit}"

    def as_line(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def plan(rng: random.Random, count: int, without: Collection[str] = ()) -> list[Fault]:
    """Faults of one session. `without`: names (`kill dockerd`) that this machine cannot do."""
    return [_fault(rng, frozenset(without)) for _ in range(count)]


def _fault(rng: random.Random, without: frozenset[str]) -> Fault:
    while True:
        (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        target = rng.choice(TARGETS[kind])
        moment = rng.choice(MOMENTS)
        nth, after = _place(rng, moment)
        if f"{kind} {target}" not in without:
            return Fault(kind, target, moment, nth, after, _lasts(rng, kind, target), rng.random())


def _place(rng: random.Random, moment: str) -> tuple[int, float]:
    nth = rng.randrange(len(TOOL_S))
    if moment == "think":
        return nth + 1, float(rng.randrange(1, 16))
    if moment == "tool":
        return nth + 1, rng.uniform(0.05, 0.8) * TOOL_S[nth]
    if moment == "snapshot":  # it begins where the tool ends, which no event tells
        return nth + 1, TOOL_S[nth] + rng.uniform(0.0, 0.15)
    if moment == "restore":  # pages come back from the tool's end to the think's first token
        return nth + 1, rng.uniform(0.0, 0.1)
    if moment == "between":
        return rng.randrange(1, 8), 0.0
    return 1, rng.uniform(0.0, 0.3)


def _lasts(rng: random.Random, kind: str, target: str) -> float:
    if kind == "stop":
        return rng.uniform(HEARTBEAT_S + 0.5, HEARTBEAT_S + 3.0)
    if kind in ("full", "cut"):
        return rng.uniform(0.3, 4.0)
    return rng.uniform(0.0, 2.0) if target == "dockerd" else 0.0
