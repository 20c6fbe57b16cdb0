"""The replay's figures, computed from evidence alone; a table of them; and what makes them green."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.engine_figures import p95
from bench.evidence import Line, only
from bench.replay_play import MODES, NONE, TIERS
from bench.wake_hear import SOURCES
from engine.facts import PAGE_SIZE


def figures(lines: Sequence[Line], sealed: bool = True) -> dict[str, Any]:
    """Tokens by source and mode, and the mean time to the first token after a tool."""
    mean_s = {mode: _mean_s(lines, mode) for mode in MODES}
    return {
        "sessions": len({line["session"] for line in only(lines, "think")}),
        "wakes": sum(_after_tool(line) for line in _of(lines, TIERS)),
        "tokens": {mode: tokens(lines, mode) for mode in MODES},
        "preempted": {mode: _preempted(lines, mode) for mode in MODES},
        "first_token_s": {mode: None if value is None else round(value, 4) for mode, value in mean_s.items()},
        "none_over_tiers": _over(mean_s[NONE], mean_s[TIERS]),
        "tokens_equal": tokens_equal(lines),
        "integrity": sorted({line["integrity"] for line in only(lines, "after")}),
        "sealed": sealed,
    }


def is_green(figure: dict[str, Any]) -> bool:
    return not misses(figure)


def misses(figure: dict[str, Any]) -> list[str]:
    """Everything that is not as it should be, in words."""
    missed = []
    if not figure["tokens_equal"]:
        missed.append("tokens with tiers are not those without")
    restored = sum(figure["tokens"][TIERS][tier] for tier in ("host", "nvme"))
    if not restored:
        missed.append("nothing came back from a tier: the pool has room for everybody")
    ratio = figure["none_over_tiers"]
    if ratio is None or ratio < 1.0:
        missed.append(f"the first token comes {ratio} times as late without tiers, at least 1.0 is wanted")
    if figure["integrity"] != ["ok"]:
        missed.append(f"the engines' books do not add up: {'; '.join(figure['integrity']) or 'nobody looked'}")
    if not figure["sealed"]:
        missed.append("the evidence is not what was measured")
    return missed


def report(lines: Sequence[Line], figure: dict[str, Any]) -> list[str]:
    """For people."""
    about = only(lines, "about")[0]
    text = [
        f"{about['model']}, {about['threads']} threads: {figure['sessions']} sessions from {about['from']},"
        f" {about['together']} at a time over a pool of {about['pool_tokens']:,} tokens",
        f"a recorded second lasts {about['scale']:g} s, {figure['wakes']} returns from a tool",
        "",
        "prompt tokens by where their KV came from".ljust(44) + "".join(name.rjust(11) for name in SOURCES),
    ]
    for mode, told in ((TIERS, "with tiers"), (NONE, "without")):
        counts = figure["tokens"][mode]
        text.append(told.ljust(44) + "".join(f"{counts[name]:11,}" for name in SOURCES))
    text += ["", "first token after a tool, ms".ljust(44) + "mean".rjust(11) + "median".rjust(11) + "p95".rjust(11)]
    for mode, told in ((TIERS, "with tiers"), (NONE, "without")):
        found = [line["first_token_s"] for line in _of(lines, mode) if _after_tool(line)]
        if found:
            cells = (statistics.mean(found), statistics.median(found), p95(found))
            text.append(told.ljust(44) + "".join(f"{1e3 * value:11,.0f}" for value in cells))
    text += [
        "",
        f"without over with: {figure['none_over_tiers']} (at least 1.0)",
        f"tokens equal with and without: {'yes' if figure['tokens_equal'] else 'NO'};"
        f" preempted: {figure['preempted'][TIERS]} with, {figure['preempted'][NONE]} without",
    ]
    return text + [f"MISSED: {miss}" for miss in misses(figure)]


def tokens(lines: Sequence[Line], mode: str) -> dict[str, int]:
    """Prompt tokens by source. What a prefetch had brought before the generation looked was on the device by then;
    it counts for the tier that had it when the pause ended."""
    total = dict.fromkeys(SOURCES, 0)
    for line in _of(lines, mode):
        for sources in (_attributed(line), line.get("settle", {}).get("sources", {})):
            for name, count in sources.items():
                total[name] += count
    return total


def tokens_equal(lines: Sequence[Line]) -> bool:
    """Whether both modes made the same thinks with the same tokens."""
    said = {mode: {(line["session"], line["turn"]): line["tokens"] for line in _of(lines, mode)} for mode in MODES}
    return bool(said[TIERS]) and said[TIERS] == said[NONE] and all(said[TIERS].values())


def _attributed(line: Line) -> dict[str, int]:
    sources, waited = dict(line["sources"]), line["waited"]
    if waited is None:
        return sources
    there = min(waited["device"] * PAGE_SIZE, waited["tokens"])
    brought = max(0, sources["device"] - there)
    sources["device"] -= brought
    sources["nvme" if waited["nvme"] > waited["host"] else "host"] += brought
    return sources


def _of(lines: Sequence[Line], mode: str) -> list[Line]:
    return [line for line in only(lines, "think") if line["mode"] == mode]


def _after_tool(line: Line) -> bool:
    return int(line["turn"]) > 0


def _preempted(lines: Sequence[Line], mode: str) -> int:
    return sum(line["preempted"] + line.get("settle", {}).get("preempted", 0) for line in _of(lines, mode))


def _mean_s(lines: Sequence[Line], mode: str) -> float | None:
    found = [line["first_token_s"] for line in _of(lines, mode) if _after_tool(line)]
    return statistics.mean(found) if found else None


def _over(first: float | None, second: float | None) -> float | None:
    return round(first / second, 3) if first and second else None
