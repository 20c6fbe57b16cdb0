"""The log of a real engine, simulated: the same arrivals, with the same KV in the same places."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from typing import Any

from bench import policy_rivals as rivals
from bench.policy_load import Turn
from bench.policy_machine import Hardware, Slot
from bench.policy_sim import Simulation
from kvtier.policy import Place, Policy, Prefill, SessionView, State

CLOSE = 0.25
"""Of the measured mean: how far the simulated one may be away for the simulation to count as true to the engine."""
SIZE = 1 << 50
BEHIND_S = 0.2
"""After its first token a turn still decodes for about so long."""
Line = dict[str, Any]


class Replay(Simulation):
    """Turns that come when they came in the log, each as a session of its own; one arrival after another."""

    def __init__(self, machine: Line, slower: float = 1.0) -> None:
        policy = Policy(rivals.Lru(), careful=False, demotes=False, pieces=1, reserves=False)
        super().__init__(hardware(machine).faster(1 / slower), policy, self._as_the_engine)
        self.returning: set[str] = set()
        self.overhead_s = overhead_s(machine) * slower

    def arrive(self, name: str, at_s: float, held: dict[str, int], out_tokens: int) -> None:
        """`held`: tokens of its context by where the engine found them, as the client's Prefill says."""
        tokens = held["device"] + held["host"] + held["nvme"]
        place = _place(held)
        self.slots[name] = Slot(
            [Turn(held["recomputed"] + held["computed"], out_tokens, "", 0.0, None, State.RUNNING, last=True)], None
        )
        self.sessions[name] = SessionView(
            name, tokens, State.PAUSED, at_s, resident=place is Place.DEVICE,
            copy=None if place is Place.DEVICE else place, copy_to=tokens if place not in (None, Place.DEVICE) else 0,
        )  # fmt: skip
        if place is not None:
            self.used[place] += tokens * self.hardware.bytes_per_token
        if source(held) != "new":
            self.returning.add(name)
        self._at(at_s, "come", name)

    def _as_the_engine(self, session: SessionView, left_s: float) -> float:
        """Those that return from a tool first, each in order of arrival."""
        return session.since_s + (0.0 if session.id in self.returning else SIZE)

    def _start(self, name: str) -> None:
        super()._start(name)
        self.taxed_s += self.overhead_s


def hardware(machine: Line) -> Hardware:
    """In the figures of a log's first line, from `bench.policy_calibrate`. Nothing was measured that is a tax."""
    (near, near_s), (far, far_s) = machine["prefill"]
    size = machine["bytes_per_token"]
    return Hardware(
        SIZE, SIZE, SIZE, Prefill.through((near, near / near_s), (far, far / far_s)), machine["decode_tps"], size,
        machine["host_tps"] * size, machine["nvme_tps"] * size, machine["nvme_tps"] * size, 0.0, 0.0,
        machine["host_latency_s"], machine["nvme_latency_s"],
    )  # fmt: skip


def overhead_s(machine: Line) -> float:
    """What a short turn takes beyond its tokens."""
    held, new, seconds = machine["again"]
    return float(max(seconds - hardware(machine).prefill.seconds(held + new, held), 0.0))


def replayed(log: list[Line]) -> list[Line]:
    """Each turn of the log: its source, and the measured and the simulated seconds to its first token.

    A line of kind "machine" begins a trace, whose lines {at_s, session, kind, ...} follow in order of time:
    "tool_ended" has `tokens` known and `new_tokens`, "first_token" has `held` and `seconds`, "tool_started" has the
    `tokens` of the context then. Raises ValueError where a first token comes without an arrival.
    """
    begins = [index for index, line in enumerate(log) if line["kind"] == "machine"]
    traces = [log[begin:end] for begin, end in itertools.pairwise([*begins, len(log)])]
    return [turn for machine, *lines in traces for turn in _in_its_weather(machine, lines)]


def _in_its_weather(machine: Line, lines: list[Line]) -> list[Line]:
    """Simulated as measured and, `fair_s`, on a machine that is slower throughout by what the turns that met no other
    turn took longer: so that the rest checks queue, order and sources, whatever else ran on the cores meanwhile."""
    turns = _replayed(machine, lines)
    for turn in turns:
        turn["alone"] = _met_nobody(turn, turns)
    longer = [turn["measured_s"] / turn["simulated_s"] for turn in turns if turn["alone"]]
    slower = statistics.median(longer) if longer else 1.0
    fair = _replayed(machine, lines, slower)
    return [{**turn, "fair_s": other["simulated_s"], "slower": slower} for turn, other in zip(turns, fair, strict=True)]


def _met_nobody(turn: Line, turns: list[Line]) -> bool:
    ends_s = turn["came_s"] + turn["measured_s"]
    return all(
        other is turn or other["came_s"] > ends_s or other["came_s"] + other["measured_s"] + BEHIND_S < turn["came_s"]
        for other in turns
    )


def _replayed(machine: Line, lines: list[Line], slower: float = 1.0) -> list[Line]:
    simulation = Replay(machine, slower)
    turns: dict[str, Line] = {}
    coming: dict[str, Line] = {}
    for line in lines:
        if line["kind"] == "tool_ended":
            coming[line["session"]] = line
        elif line["kind"] == "first_token":
            came = coming.pop(line["session"], None)
            if came is None:
                raise ValueError(f"{line['session']} has a first token at {line['at_s']} s and did not come before")
            name = f"{line['session']}@{line['at_s']}"
            turns[name] = {"came_s": came["at_s"], "source": source(line["held"]), "measured_s": line["seconds"]}
            simulation.arrive(name, came["at_s"], line["held"], machine["out_tokens"])
    for event, first_s in simulation.run().events:
        turn = turns[event.removesuffix("/0")]
        turn["simulated_s"] = first_s - turn["came_s"]
    return list(turns.values())


def source(held: dict[str, int]) -> str:
    """Where most of a context came from that was known before; "new" where nothing was."""
    known = {name: held[name] for name in ("device", "host", "nvme", "recomputed")}
    most = max(known, key=lambda name: known[name])
    return ("recompute" if most == "recomputed" else most) if known[most] else "new"


def _place(held: dict[str, int]) -> Place | None:
    """Of several, that of most tokens."""
    known = {place: held[place.value] for place in Place}
    most = max(known, key=lambda place: known[place])
    return most if known[most] else None


def compared(log: list[Line]) -> dict[str, Any]:
    """Mean first-token times by source, and over all turns.

    `deviation`: of the simulated from the measured, on the machine as calibrated; `fair_deviation`: on that machine as
    slow as it was during the trace; `slower`: by how much, over the traces. `met`: of the turns that met others, from
    which that was not taken.
    """
    turns = replayed(log)
    by_source: dict[str, list[Line]] = defaultdict(list)
    for turn in turns:
        by_source[turn["source"]].append(turn)
    others = [turn for turn in turns if not turn["alone"]]
    met = {"met": _means(others)} if others else {}
    slower = statistics.fmean(turn["slower"] for turn in turns)
    return {
        **_means(turns),
        "slower": round(slower, 3),
        **met,
        "sources": {name: _means(of) for name, of in sorted(by_source.items())},
    }


def _means(turns: list[Line]) -> dict[str, Any]:
    names = ("measured_s", "simulated_s", "fair_s")
    measured, simulated, fair = (statistics.fmean(turn[name] for turn in turns) for name in names)
    return {
        "turns": len(turns),
        "measured_s": round(measured, 4),
        "simulated_s": round(simulated, 4),
        "deviation": round(simulated / measured - 1, 4),
        "fair_deviation": round(fair / measured - 1, 4),
    }


def is_close(figure: dict[str, Any]) -> bool:
    return bool(abs(figure["fair_deviation"]) <= CLOSE)
