"""One policy on one machine under one load: a line of evidence."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench import policy_rivals as rivals
from bench.policy_load import CONTEXT_TOKENS, MIXES, Arrival, Turn, mean_pause_s, sessions
from bench.policy_machine import Hardware, Outcome
from bench.policy_sim import Order, Simulation
from kvtier.policy import Expected, Keep, Policy, TierKeep

RATIOS = (0.9, 1.8, 3.7)
"""Live set over the capacity of all tiers below the device."""
DEVICE_SHARE = 1 / 8
"""Of the live set, on the device."""
LEAST_ON_DEVICE = 3
"""The longest sessions that the device holds at least; with less it could not work."""
DEMAND = 0.5
"""What recomputing at every turn would ask of the device, as a part of what it has.

Two hundred sessions would ask the real engine for half of its time where people answer (it is the speed of the real
engine to a few per cent), and for tens to hundreds of times its time where tools take seconds. There only the order of
the queue would be measured, so the machine is made faster, in every rate, until each mix asks for the same.
"""
SESSIONS = 200
RIVALS = ("lru", "ttl", "continuum", "continuum-released", "thunderagent", "infercept")
OURS = "ours"
ORACLES = ("oracle", "oracle-farthest")
BOUND, BOUND_WITH_FORESIGHT = "bound", "bound-foresight"
"""Not policies: see `bench.policy_bound`."""
OUR_ORDER = "-our-order"
"""After the name of a policy: the same, served in our order."""
NONE_OURS = "none" + OUR_ORDER
POLICIES = ("none", NONE_OURS, "infinite", *ORACLES, OURS, "informed", *RIVALS)
SABOTAGE: dict[str, Callable[[], Policy]] = {
    "price": lambda: Policy(rivals.Inverted(Expected())),
    "survival": lambda: Policy(TierKeep(rivals.Blind())),
    "bandwidth": lambda: rivals.Deaf(TierKeep(Expected())),
    "promote": lambda: rivals.Eager(TierKeep(Expected())),
}
ORDERS: dict[str, Order] = {
    **dict.fromkeys((OURS, "informed", *ORACLES), rivals.least_left),
    "continuum": rivals.pinned_first,
    "continuum-released": rivals.pinned_first,
    "thunderagent": rivals.shortest_first,
}
OTHERS: dict[str, Callable[[], Keep]] = {
    "none": rivals.Lru,
    "infinite": rivals.Lru,
    "lru": rivals.Lru,
    "ttl": rivals.Ttl,
    "continuum": rivals.Continuum,
    "continuum-released": rivals.ContinuumReleased,
    "thunderagent": rivals.ThunderAgent,
    "infercept": rivals.InferCept,
}
Ends = dict[tuple[str, int], float]
Found = tuple[list[Turn], int, float, Iterator[list[Turn]]]


@dataclass(frozen=True)
class Length:
    """How many first tokens are let pass, and how many measured after them."""

    warm: int = 120
    measure: int = 240


def make(name: str, mix: str, ends_s: Ends, sabotage: str | None = None) -> Policy:
    """A policy by name. `ends_s` is filled by the simulation; only the oracles look at it."""
    if name in OTHERS:
        return Policy(OTHERS[name](), careful=False, demotes=False, pieces=1, reserves=False)
    if name == "oracle":
        return Policy(TierKeep(rivals.Prophet(ends_s)))
    if name == "oracle-farthest":
        return Policy(rivals.Farthest(rivals.Prophet(ends_s)))
    if name == "informed":
        return Policy(TierKeep(rivals.Informed(MIXES[mix])))
    return SABOTAGE[sabotage]() if sabotage else Policy(TierKeep(Expected()))


def population(seed: int, mix: str) -> list[Found]:
    """Sessions as one finds them at any moment: longer pauses are likelier to be found, at any point of theirs."""
    rng = random.Random(f"{seed}/found")
    found: list[Found] = []
    for slot in range(SESSIONS):
        following = sessions(f"{seed}/{slot}", MIXES[mix])
        candidates = [
            (turns, index) for turns in (next(following) for _ in range(12)) for index in range(len(turns) - 1)
        ]
        (turns, index), *_ = rng.choices(candidates, [turns[index].pause_s for turns, index in candidates])
        found.append((turns, index, rng.random(), following))
    return found


def live_tokens(found: list[Found]) -> int:
    return sum(_held(turns, index) for turns, index, _, _ in found)


def speed(found: list[Found], mix: str, demand: float, machine: Hardware) -> float:
    """How many times faster than the real one the machine has to be for this demand."""
    work = [machine.prefill.seconds(_held(turns, k)) for turns, _, _, _ in found for k in range(len(turns) - 1)]
    return SESSIONS * sum(work) / len(work) / mean_pause_s(mix) / demand


def simulate(
    name: str, mix: str, ratio: float, seed: int, length: Length, demand: float, sabotage: str | None = None
) -> dict[str, Any]:
    """One line: what was simulated and what came out. A `demand` of 0 keeps the real engine's speed."""
    simulation, times = prepared(name, mix, ratio, seed, length, demand, sabotage)
    outcome = simulation.run()
    return {"policy": name, "mix": mix, "ratio": ratio, "seed": seed, "demand": demand, **_facts(outcome, times)}


def prepared(
    name: str, mix: str, ratio: float, seed: int, length: Length, demand: float, sabotage: str | None = None
) -> tuple[Simulation, float]:
    """A simulation with its sessions in their first pause, and how many times faster the machine is."""
    found = population(seed, mix)
    machine = Hardware()
    times = speed(found, mix, demand, machine) if demand else 1.0
    live = live_tokens(found) * machine.bytes_per_token
    simulation = _simulation(name, mix, machine.faster(times), live, ratio, length, sabotage)
    for turns, index, left, following in found:
        simulation.begin_paused(turns, index, left, following)
    return simulation, times


def chat(
    conversations: list[Arrival], name: str, ratio: float, demand: float, sabotage: str | None = None, every: int = 5
) -> dict[str, Any]:
    """The same on recorded chat traffic (every n-th conversation), whose gaps are the recorded ones."""
    arrivals = conversations[::every]
    machine = Hardware()
    horizon_s = max(arrival.at_s for arrival in arrivals)
    work_s = sum(machine.prefill.seconds(_held(a.turns, k)) for a in arrivals for k in range(len(a.turns) - 1))
    times = work_s / horizon_s / demand
    paused = ((a.turns, k) for a in arrivals for k in range(len(a.turns) - 2))
    live = sum(_held(turns, k) * turns[k].pause_s for turns, k in paused) / horizon_s
    count = sum(len(a.turns) - 1 for a in arrivals)
    machine, live_bytes = machine.faster(times), int(live * machine.bytes_per_token)
    simulation = _simulation(name, "chat", machine, live_bytes, ratio, Length(0, count), sabotage)
    for arrival in arrivals:
        simulation.begin(arrival.turns, arrival.at_s)
    return {
        "policy": name,
        "mix": "chat",
        "ratio": ratio,
        "seed": 0,
        "demand": demand,
        **_facts(simulation.run(), times),
    }


def _simulation(
    name: str, mix: str, machine: Hardware, live_bytes: int, ratio: float, length: Length, sabotage: str | None
) -> Simulation:
    ends_s: Ends = {}
    tier_bytes = 0.0 if name in ("none", NONE_OURS, "infinite") else live_bytes / ratio
    device_bytes = max(live_bytes * DEVICE_SHARE, LEAST_ON_DEVICE * CONTEXT_TOKENS * machine.bytes_per_token)
    sized = machine.sized(1 << 62 if name == "infinite" else device_bytes, tier_bytes)
    policy = make(name.removesuffix(OUR_ORDER), mix, ends_s, sabotage)
    order = rivals.least_left if name.endswith(OUR_ORDER) else ORDERS.get(name, rivals.first_come)
    return Simulation(sized, policy, order, length.warm, length.measure, ends_s)


def _held(turns: list[Turn], index: int) -> int:
    return sum(turn.new_tokens + turn.out_tokens for turn in turns[: index + 1])


def _facts(outcome: Outcome, times: float) -> dict[str, Any]:
    return {
        "speed": round(times, 3),
        "waited_s": outcome.waited_s,
        "firsts": outcome.firsts,
        "recomputed_tokens": outcome.recomputed_tokens,
        "restored_bytes": outcome.restored_bytes,
        "stored_bytes": outcome.stored_bytes,
        "promoted_bytes": outcome.promoted_bytes,
        "promoted_unused_bytes": outcome.promoted_unused_bytes,
    }
