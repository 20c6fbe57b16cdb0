"""Figures of `bench.sandbox` from its evidence. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench.evidence import Line, only

CLAIM_TIMES, CALL_TIMES, SNAPSHOT_SHARE, ATTEMPTS = 15.0, 20.0, 0.2, 40
PAIRS = {"claim": "docker_run", "call": "docker_exec", "snapshot": "docker_commit"}


def figures(lines: list[Line], sealed: bool) -> dict[str, Any]:
    """Milliseconds; None where there is no Docker. `*_times`: how many times faster than Docker's own way."""
    figure: dict[str, Any] = {"bench": "sandbox", "sealed": sealed}
    for kind in ("claim", "docker_run", "call", "docker_exec", "snapshot", "docker_commit", "restore"):
        figure[f"{kind}_p50_ms"] = _percentile(only(lines, kind), 0.5)
    figure["claim_p99_ms"] = _percentile(only(lines, "claim"), 0.99)
    for ours, theirs in PAIRS.items():
        mine, other = figure[f"{ours}_p50_ms"], figure[f"{theirs}_p50_ms"]
        figure[f"{ours}_times"] = round(other / mine, 2) if mine and other else None
    claims, escapes = only(lines, "claim"), only(lines, "escape")
    figure["claims"], figure["claims_missed"] = len(claims), sum(not line["ready"] for line in claims)
    figure["wrong"] = sum(not line["right"] for line in lines if "right" in line)
    figure["escapes_tried"] = len(escapes)
    figure["escapes"] = sum(bool(line["got"]) for line in escapes)
    figure["escapes_by_driver"] = {
        name: sum(line["driver"] == name for line in escapes) for name in sorted({line["driver"] for line in escapes})
    }
    figure["driver"] = next((line["driver"] for line in only(lines, "about")), None)
    figure["load"] = next((line["load"] for line in only(lines, "about")), None)
    return figure


def misses(figure: dict[str, Any]) -> list[str]:
    """What is not as it should be, in sentences."""
    said = []
    if not figure["sealed"]:
        said.append("the evidence was altered")
    if figure["wrong"]:
        said.append(f"{figure['wrong']} answers, snapshots or restores were wrong")
    if figure["escapes"]:
        said.append(f"{figure['escapes']} attempts got out")
    few = [name for name, count in figure["escapes_by_driver"].items() if count < ATTEMPTS]
    if few or not figure["escapes_by_driver"]:
        said.append(f"fewer than {ATTEMPTS} attempts were made on {', '.join(few) or 'any driver'}")
    bars = {"claim": CLAIM_TIMES, "call": CALL_TIMES, "snapshot": 1 / SNAPSHOT_SHARE}
    for ours, bar in bars.items():
        times = figure[f"{ours}_times"]
        if times is not None and times < bar:
            said.append(f"a {ours} is {times:g} times faster than {PAIRS[ours].replace('_', ' ')}, not {bar:g} times")
    return said


def is_green(figure: dict[str, Any]) -> bool:
    return not misses(figure)


def report(figure: dict[str, Any]) -> list[str]:
    said = [f"in {figure['driver']}, median milliseconds, Docker's own way beside it"]
    for ours, theirs in PAIRS.items():
        beside = figure[f"{theirs}_p50_ms"]
        faster = f"  {theirs.replace('_', ' ')} {beside:8.1f}  {figure[f'{ours}_times']:.1f} times" if beside else ""
        said.append(f"  {ours:9} {figure[f'{ours}_p50_ms']:7.1f}{faster}")
    said.append(f"  restore   {figure['restore_p50_ms']:7.1f}")
    missed = f"{figure['claims_missed']} of {figure['claims']} found the pool empty"
    said.append(f"  the slowest claim in a hundred took {figure['claim_p99_ms']:.0f} ms; {missed}")
    tried = ", ".join(f"{count} on {name}" for name, count in figure["escapes_by_driver"].items())
    said.append(f"  {figure['escapes']} of {figure['escapes_tried']} attempts got out ({tried})")
    return [*said, *(f"MISSED: {miss}" for miss in misses(figure))]


def _percentile(lines: Sequence[Line], share: float) -> float | None:
    """The smallest value that is not exceeded by `share` of all; the mean of the middle two for a median."""
    values: list[float] = sorted(line["s"] * 1000 for line in lines)
    if not values:
        return None
    if share == 0.5:
        return round(statistics.median(values), 2)
    return round(values[min(len(values) - 1, math.ceil(share * len(values)) - 1)], 2)
