"""What the capacity bench's evidence says: predicted beside measured, and who met the time for a token."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.evidence import Line, only
from bench.quiet import DISTURBED_CORES

# measured / predicted, each the best of all rounds. A plan knows the speed of a short prompt and of one step; the rest
# is arithmetic, and a floor: matrices of eight rows are computed at less than the speed of a prompt's.
BANDS = {"prefill": (0.7, 1.5), "decode": (0.6, 1.7), "batch": (0.6, 2.5)}
MET = 1.25  # of the time for a token, at the planned maximum: what the scheduler and the wire cost is not in a plan
MISSED = 1.5  # of it, with three times as many sessions


def figures(lines: Sequence[Line], sealed: bool) -> dict[str, Any]:
    """Recomputed from raw samples alone."""
    pages = only(lines, "page")
    found: dict[str, Any] = {
        "sealed": sealed,
        "foreign_cores": round(median(only(lines, "machine")[0]["foreign_cores"]), 2),
        "pages": len(pages),
        "pages_wrong": sum(one["predicted_bytes"] != one["allocated_bytes"] for one in pages),
    }
    for name in BANDS:
        timings = [one for one in only(lines, "timing") if one["column"] == name]
        found[f"{name}_ratio"] = round(min(one["seconds"] for one in timings) / timings[0]["predicted_s"], 3)
    for what in ("planned", "above"):
        loads = [one for one in only(lines, "load") if one["what"] == what]
        parts = [median(one["seconds_per_token"]) / one["slo_s"] for one in loads]
        found[f"{what}_of_slo"] = round(min(parts) if what == "planned" else median(parts), 3)
        found[f"{what}_sessions"] = loads[0]["sessions"]
    return found


def misses(figure: dict[str, Any]) -> list[str]:
    """Every bar that is missed, in words."""
    found = [] if figure["sealed"] else ["the evidence was altered after it was left"]
    if figure["foreign_cores"] > DISTURBED_CORES:
        found.append(f"other programs used {figure['foreign_cores']} cores: the times are no measure")
    if figure["pages_wrong"] or not figure["pages"]:
        found.append(f"{figure['pages_wrong']} of {figure['pages']} kinds of pages have other bytes than planned")
    for name, (low, high) in BANDS.items():
        ratio = figure[f"{name}_ratio"]
        if not low <= ratio <= high:
            found.append(f"{name} took {ratio} times what was planned; {low} to {high} is the band")
    if figure["planned_of_slo"] > MET:
        found.append(
            f"the planned maximum took {figure['planned_of_slo']} times the time for a token; {MET} is the bar"
        )
    if figure["above_of_slo"] < MISSED:
        found.append(f"three times as many took only {figure['above_of_slo']} times it: the plan is too careful")
    return found


def is_green(figure: dict[str, Any]) -> bool:
    return not misses(figure)


def report(lines: Sequence[Line], figure: dict[str, Any]) -> list[str]:
    """For people."""
    machine = only(lines, "machine")[0]
    text = [
        f"{machine['model']}, {machine['threads']} threads: {machine['bps'] / 1e9:.1f} GB/s in a step, "
        f"{machine['flops'] / 1e9:.0f} GFLOP/s in a short prompt",
        f"pages: {figure['pages']} kinds, {figure['pages_wrong']} with other bytes than planned",
    ]
    for name, (low, high) in BANDS.items():
        text.append(f"{name}: measured / planned {figure[f'{name}_ratio']} ({low} to {high})")
    text.append(f"{figure['planned_sessions']} sessions, the planned maximum: {figure['planned_of_slo']} of the SLO")
    text.append(f"{figure['above_sessions']} sessions: {figure['above_of_slo']} of the SLO")
    return [*text, *(f"MISSED: {miss}" for miss in misses(figure))]
