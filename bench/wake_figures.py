"""The wake bench's figures, computed from evidence alone, and the bars that they are held to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.evidence import Line, only
from bench.wake_bed import HOST, NONE, NVME, PINNED, STATES, TIERS

Samples = dict[tuple[int, str], dict[int, Line]]  # (context, state) -> round -> sample

BARS: dict[tuple[str, str], tuple[bool, float]] = {
    ("recompute_over_nvme", "2048"): (True, 25.0),
    ("host_over_pinned", "2048"): (False, 1.2),
    ("worst_vs_no_tier", "256"): (False, 1.05),
    ("disk_fraction", ""): (True, 0.8),
}
"""(figure, context) -> whether more is better, and the bar."""


def figures(lines: Sequence[Line], sealed: bool = True) -> dict[str, Any]:
    """Ratios are medians over rounds of two states' times in that round; disk fractions are of medians."""
    samples = by_state(lines)
    contexts = sorted({context for context, _ in samples})
    busy = [line["foreign_cores"] for line in lines if "foreign_cores" in line]
    return {
        "recompute_over_nvme": _each(contexts, lambda c: paired(samples, c, "usable_s", NONE, NVME)),
        "host_over_pinned": _each(contexts, lambda c: paired(samples, c, "first_token_s", HOST, PINNED)),
        "worst_vs_no_tier": _each(contexts, lambda c: _worst(samples, c)),
        "disk_fraction": _fraction(lines, "path"),
        "tier_fraction": _fraction(lines, "tier"),
        "tokens_equal": tokens_equal(samples),
        "lost_tokens": sum(line["sources"].get("recomputed", 0) for line in wakes(lines) if line["state"] != NONE),
        "clipped": sum(line["receipt"]["status"] != "accepted" for line in wakes(lines) if "receipt" in line),
        "quarantined": sum(line["quarantined"] for line in only(lines, "after")),
        "integrity": sorted({line["integrity"] for line in only(lines, "after")}),
        "foreign_cores": round(statistics.median(busy or [0.0]), 3),
        "sealed": sealed,
    }


def is_green(figure: dict[str, Any]) -> bool:
    return not misses(figure)


def misses(figure: dict[str, Any]) -> list[str]:
    """Every bar that is not reached, in words."""
    missed = []
    for (name, context), (more, bar) in BARS.items():
        value = figure[name].get(context) if context else figure[name]
        place = f" at {context}" if context else ""
        if value is None:
            missed.append(f"{name}{place} was not measured")
        elif value < bar if more else value > bar:
            missed.append(f"{name}{place} is {value}, at {'least' if more else 'most'} {bar} is wanted")
    if not figure["tokens_equal"]:
        missed.append("the tokens after a wake depend on where the KV waited")
    if figure["lost_tokens"] or figure["clipped"]:
        missed.append(f"{figure['lost_tokens']} tokens were computed again though a tier had them")
    if figure["quarantined"]:
        missed.append(f"{figure['quarantined']} pages did not verify")
    if figure["integrity"] != ["ok"]:
        missed.append(f"the engine's books do not add up: {'; '.join(figure['integrity']) or 'nobody looked'}")
    if not figure["sealed"]:
        missed.append("the evidence is not what was measured")
    return missed


def wakes(lines: Sequence[Line]) -> list[Line]:
    return only(lines, "wake")


def by_state(lines: Sequence[Line]) -> Samples:
    found: Samples = {}
    for line in wakes(lines):
        found.setdefault((line["context"], line["state"]), {})[line["round"]] = line
    return found


def median(samples: Samples, context: int, state: str, field: str) -> float | None:
    rounds = samples.get((context, state), {})
    return statistics.median(line[field] for line in rounds.values()) if rounds else None


def paired(samples: Samples, context: int, field: str, over: str, under: str) -> float | None:
    """The median, over rounds, of one state's time over another's in the same round."""
    first, second = samples.get((context, over), {}), samples.get((context, under), {})
    ratios = [first[number][field] / second[number][field] for number in first if number in second]
    return round(statistics.median(ratios), 3) if ratios else None


def tokens_equal(samples: Samples) -> bool:
    """Whether in every round every state gave the same tokens; False if a state is missing or said nothing."""
    contexts = {context for context, _ in samples}
    rounds = {(context, number) for (context, _), taken in samples.items() for number in taken}
    said = [
        [samples[context, state].get(number, {}).get("tokens") for state in STATES if (context, state) in samples]
        for context, number in rounds
    ]
    whole = all((context, state) in samples for context in contexts for state in STATES)
    return bool(said) and whole and all(one[0] and all(other == one[0] for other in one) for one in said)


def _worst(samples: Samples, context: int) -> float | None:
    found = [paired(samples, context, "first_token_s", tier, NONE) for tier in TIERS]
    there = [ratio for ratio in found if ratio is not None]
    return max(there) if there else None


def _each(contexts: Sequence[int], figure: Callable[[int], float | None]) -> dict[str, float | None]:
    return {str(context): figure(context) for context in contexts}


def median_rate(lines: Sequence[Line], read: str) -> float | None:
    """Bytes per second."""
    rates = [line["bytes"] / line["seconds"] for line in only(lines, "disk") if line["read"] == read]
    return statistics.median(rates) if rates else None


def _fraction(lines: Sequence[Line], read: str) -> float | None:
    ours, raw = median_rate(lines, read), median_rate(lines, "raw")
    return None if ours is None or raw is None else round(ours / raw, 3)
