"""Halving a bandwidth must change the answer.

The machine is the one of the break-even that is published (70B on eight devices at half of their speed: 35.7 us and
327,680 B per token, so a tier pays above 9.2 GB/s), with a disk that reads and writes 14 GB/s, and then 7.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bench import policy_rivals as rivals
from bench.policy_machine import Hardware
from bench.policy_run import DEMAND, OURS, Length, live_tokens, make, population, speed
from bench.policy_sim import Simulation
from kvtier.policy import Keep, Move, Place, Policy, Prefill, Reason, SessionView, View

HALVED = "halved"
PUBLISHED = Hardware(
    prefill=Prefill(35.7e-6), bytes_per_token=327_680, host_bps=50e9, nvme_read_bps=14e9, nvme_write_bps=14e9
)
ASKED = (Reason.TOOL_STARTED, Reason.SCHEDULED)


class Frozen:
    """The same worth, learning nothing twice."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep

    def learn(self, view: View) -> None:
        pass

    def worth(self, session: SessionView, place: Place, view: View, start: int, stop: int) -> float:
        return self.keep.worth(session, place, view, start, stop)


class Compared(Policy):
    """Asks a policy about every view, and again with every bandwidth halved."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.keep)
        self.policy = policy
        self.again = type(policy)(Frozen(policy.keep))
        self.asked = self.changed = 0

    def decide(self, view: View) -> list[Move]:
        moves = self.policy.decide(view)
        if view.reason in ASKED:
            slower = (dataclasses.replace(t, read_bps=t.read_bps / 2, write_bps=t.write_bps / 2) for t in view.tiers)
            other = self.again.decide(dataclasses.replace(view, tiers=tuple(slower)))
            self.asked += 1
            self.changed += _done(moves) != _done(other)
        return moves


def _done(moves: list[Move]) -> list[tuple[str, str, Place, int]]:
    return [(move.kind, move.session, move.place, move.size_bytes) for move in moves]


def halved(
    seed: int, length: Length, sabotage: str | None = None, mix: str = "mixed", ratio: float = 1.8
) -> dict[str, Any]:
    """A line: how many of our answers were others at half the bandwidth."""
    found = population(seed, mix)
    machine = PUBLISHED.faster(speed(found, mix, DEMAND, PUBLISHED))
    live = live_tokens(found) * machine.bytes_per_token
    policy = Compared(make(OURS, mix, {}, sabotage))
    simulation = Simulation(
        machine.sized(live / 8, live / ratio), policy, rivals.least_left, length.warm, length.measure
    )
    for turns, index, left, following in found:
        simulation.begin_paused(turns, index, left, following)
    simulation.run()
    return {
        "policy": HALVED,
        "mix": mix,
        "ratio": ratio,
        "seed": seed,
        "asked": policy.asked,
        "changed": policy.changed,
    }
