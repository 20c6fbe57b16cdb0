"""The steps bench's figures, computed from evidence alone, and the bars that they are held to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from bench.evidence import Line, only

MOST_OVERHEAD = 1.5
MOST_KB_PER_PARKED = 100.0
OVERHEAD_OF = ("node", "worker", "api", "temporal", "postgres")  # all but the engine


def figures(lines: Sequence[Line], sealed: bool = True) -> dict[str, Any]:
    wakes, rested = only(lines, "wake"), only(lines, "rest")
    started = [line["started_s"] for line in wakes if line["started_s"] is not None]
    token = [line["token_s"] for line in wakes if line["token_s"] is not None]
    parked = sum(line["sessions"] for line in only(lines, "memory"))
    return {
        "overhead_ratio": overhead_ratio(lines),
        "overhead_cpu_ms": _round(sum(cpu_ms(lines).values()), 2) if only(lines, "cpu") else None,
        "overhead_ms": {name: _median_ms(ones) for name, ones in _by_step(lines).items()},
        "overhead_ratio_by_step": {name: _round(statistics.median(ones), 2) for name, ones in _ratios(lines).items()},
        "bare_ms": _median_ms([_beside(line, {}) for line in only(lines, "bare")]),
        "bare_idle_ms": _median_ms([_wall(line) for line in only(lines, "bare") if not line["engine_s"]]),
        "cpu_ms": {name: _round(value, 2) for name, value in cpu_ms(lines).items()},
        "parked": parked,
        "ram_kb_per_parked": _kb_per_parked(lines),
        "woken": sum(count for line in rested for state, count in line["states"].items() if state == "idle"),
        "wake_p50_ms": _median_ms(started),
        "wake_p99_ms": _round(1e3 * sorted(started)[int(0.99 * len(started))], 1) if started else None,
        "wake_token_p50_ms": _median_ms(token),
        "breakdown_ms": breakdown(lines),
        "sealed": sealed,
    }


def is_green(figure: dict[str, Any]) -> bool:
    return not misses(figure)


def misses(figure: dict[str, Any]) -> list[str]:
    missed = []
    ratio = figure["overhead_ratio"]
    if ratio is None or ratio > MOST_OVERHEAD:
        missed.append(f"a step costs {ratio} bare activities beside model and tool, at most {MOST_OVERHEAD} is wanted")
    held = figure["ram_kb_per_parked"].get("api_worker")
    if figure["parked"] and (held is None or held > MOST_KB_PER_PARKED):
        missed.append(f"a parked session holds {held} KB of api and worker, at most {MOST_KB_PER_PARKED} are wanted")
    if figure["woken"] != figure["parked"]:
        missed.append(f"{figure['woken']} of {figure['parked']} sessions rest after they were woken")
    if not figure["sealed"]:
        missed.append("the evidence is not what was measured")
    return missed


def overhead_ratio(lines: Sequence[Line]) -> float | None:
    """Median over pairs of a step's wall beside model and tool, over that of the bare activity in its place."""
    ratios = [ratio for ones in _ratios(lines).values() for ratio in ones]
    return _round(statistics.median(ratios), 2) if ratios else None


def _ratios(lines: Sequence[Line]) -> dict[str, list[float]]:
    """By step: its wall beside model and tool over its bare activity's beside the engine's work, of the same round."""
    inside = _inside(lines)
    bare = {(line["round"], line["place"]): _beside(line, {}) for line in only(lines, "bare")}
    found: dict[str, list[float]] = {}
    for line in only(lines, "step"):
        other = bare.get((line["round"], line["place"]))
        if other:
            found.setdefault(line["step"], []).append(_beside(line, inside) / other)
    return found


def _by_step(lines: Sequence[Line]) -> dict[str, list[float]]:
    inside = _inside(lines)
    found: dict[str, list[float]] = {}
    for line in only(lines, "step"):
        found.setdefault(line["step"], []).append(_beside(line, inside))
    return found


def _beside(line: Line, inside: dict[tuple[str, str], float]) -> float:
    """Seconds of a step that neither the engine nor the sandbox's call took."""
    key = (str(line.get("workflow")), str(line.get("activity")))
    return _wall(line) - float(line["engine_s"]) - inside.get(key, 0.0)


def _wall(line: Line) -> float:
    return float(line["dispatch_s"] + line["inside_s"] + line["hop_s"])


def _inside(lines: Sequence[Line]) -> dict[tuple[str, str], float]:
    """What the sandbox says that calls took, by workflow and activity."""
    found: dict[tuple[str, str], float] = {}
    for line in only(lines, "span"):
        if line["inside_s"] is not None:
            key = (line["workflow"], line["activity"])
            found[key] = found.get(key, 0.0) + line["inside_s"]
    return found


def cpu_ms(lines: Sequence[Line]) -> dict[str, float]:
    """CPU milliseconds of a step by process, the engine's left out; means, since clocks tick in 10 ms."""
    steps = sum(line["steps"] for line in only(lines, "cpu"))
    if not steps:
        return {}
    spent: dict[str, float] = {}
    for line in only(lines, "cpu"):
        for name, seconds in line["seconds"].items():
            if name.rpartition("-")[0] in OVERHEAD_OF or name in OVERHEAD_OF:
                spent[name] = spent.get(name, 0.0) + seconds
    return {name: 1e3 * seconds / steps for name, seconds in spent.items()}


def _kb_per_parked(lines: Sequence[Line]) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in only(lines, "memory"):
        grown = {name: (line["after"][name] - line["before"][name]) / 1024 / line["sessions"] for name in line["after"]}
        found["api_worker"] = round(grown["api"] + grown["worker"], 1)
        found |= {name: round(value, 1) for name, value in grown.items()}
    return found


def breakdown(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Mean milliseconds of each part, by step: Temporal's three, then what the node did; parts contain each other."""
    found: dict[str, dict[str, list[float]]] = {}
    counts: dict[str, int] = {}
    for line in only(lines, "step"):
        counts[line["step"]] = counts.get(line["step"], 0) + 1
        for part in ("dispatch_s", "inside_s", "hop_s"):
            name = f"temporal {part[:-2]}" if part != "inside_s" else "activity"
            found.setdefault(line["step"], {}).setdefault(name, []).append(line[part])
        if line["engine_s"]:
            found[line["step"]].setdefault("engine's own", []).append(line["engine_s"])
    for line in only(lines, "span"):
        found.setdefault(line["step"], {}).setdefault(line["name"], []).append(line["seconds"])
    return {
        step: {name: round(1e3 * sum(ones) / counts[step], 2) for name, ones in parts.items()}
        for step, parts in found.items()
        if step in counts
    }


def _median_ms(seconds: Iterable[float]) -> float | None:
    ordered = list(seconds)
    return _round(1e3 * statistics.median(ordered), 1) if ordered else None


def _round(value: float, digits: int) -> float:
    return round(value, digits)


def report(figure: dict[str, Any]) -> list[str]:
    """The figures as a table."""
    text = [f"a bare activity: {figure['bare_ms']} ms; a step beside model and tool: {figure['overhead_ratio']} of it"]
    text.append(f"of those with no engine's work in them: {figure['bare_idle_ms']} ms")
    text += [f"{name}: {ratio} of the one in its place" for name, ratio in figure["overhead_ratio_by_step"].items()]
    for step, parts in figure["breakdown_ms"].items():
        text.append(f"{step}: {figure['overhead_ms'][step]} ms beside model and tool")
        text += [f"    {name:<24}{ms:>9.2f} ms" for name, ms in parts.items()]
    text += [f"CPU of a step, {name:<12}{ms:>9.2f} ms" for name, ms in figure["cpu_ms"].items()]
    for name, kb in figure["ram_kb_per_parked"].items():
        text.append(f"memory of a parked session, {name:<12}{kb:>9.1f} KB")
    text.append(f"{figure['woken']} of {figure['parked']} woken: {figure['wake_p50_ms']} ms until their step begins")
    return text
