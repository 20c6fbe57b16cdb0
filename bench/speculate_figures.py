"""The figures of `bench.speculate`, from its evidence."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from bench.evidence import Line, only

MODES = ("drafts", "plain")
LEAST_MEDIAN, LEAST_WORST = 1.3, 0.97
CONTEXTS = (0, 2048, 4096)
LONG_OUTPUT = 512  # tokens


def figures(lines: list[Line], sealed: bool = True) -> dict[str, Any]:
    """speedup_median: of sessions alone in which a tool said much, decoding time without drafts over that with, of what
    is said after that; speedup_thinks: of single thinks; speedup_total: of all together; worst: of whole sessions, in
    any batch; accepted: of what was drafted; tokens_equal: all that was said with drafts was said without."""
    thinks = only(lines, "think")
    strata = [_stratum(thinks, batch, at) for batch in sorted({one["batch"] for one in thinks}) for at in CONTEXTS]
    alone = [one for one in thinks if one["batch"] == 1]
    behind_long = [one for one in alone if one["longest_output"] >= LONG_OUTPUT]
    replays = [_whole([one for one in behind_long if one["session"] == name]) for name in _names(behind_long)]
    ratios = _ratios(alone)
    sessions = [
        _whole([one for one in thinks if one["batch"] == batch and (batch > 1 or one["session"] == name)])
        for batch, name in sorted({(one["batch"], one["session"] if one["batch"] == 1 else "") for one in thinks})
    ]
    drafted = sum(one["drafted"] for one in thinks)
    return {
        "bench": "speculate",
        "speedup_median": round(statistics.median(replays), 3) if replays else None,
        "speedup_thinks": round(statistics.median(ratios), 3) if ratios else None,
        "speedup_total": round(_whole(alone), 3) if alone else None,
        "worst": round(min(sessions), 3) if sessions else None,
        "accepted": round(sum(one["accepted"] for one in thinks) / drafted, 3) if drafted else None,
        "tokens_equal": _equal(lines),
        "thinks": len(thinks) // 2,
        "strata": [one for one in strata if one is not None],
        "sealed": sealed,
    }


def misses(figure: dict[str, Any]) -> list[str]:
    missed = []
    if not figure["tokens_equal"]:
        missed.append("what was said with drafts is not what was said without")
    if not figure["sealed"]:
        missed.append("the evidence was changed after the run")
    if figure["speedup_median"] is None or figure["speedup_median"] < LEAST_MEDIAN:
        missed.append(f"drafts bring {figure['speedup_median']} of the speed without, less than {LEAST_MEDIAN}")
    if figure["worst"] is None or figure["worst"] < LEAST_WORST:
        missed.append(f"a session runs at {figure['worst']} of its speed without drafts, less than {LEAST_WORST}")
    return missed


def is_green(figure: dict[str, Any]) -> bool:
    return not misses(figure)


def report(lines: Sequence[Line], figure: dict[str, Any]) -> list[str]:
    (about,) = only(lines, "about")
    told = [f"{about['model']} {about['dtype']} on {about['backend']}/{about['instruction_set']}, {about['trace']}"]
    told.append(f"{'batch':>5} {'context':>8} {'thinks':>6} {'accepted':>8} {'tokens/pass':>11} {'speed':>6}")
    for one in figure["strata"]:
        told.append(
            f"{one['batch']:>5} {one['context']:>8} {one['thinks']:>6} {one['accepted']!s:>8}"
            f" {one['tokens_per_step']!s:>11} {one['speedup']:>6}"
        )
    told.append(f"sessions with long outputs {figure['speedup_median']}, in all {figure['speedup_total']}")
    told.append(f"single thinks {figure['speedup_thinks']}")
    told.append(f"worst session {figure['worst']}, tokens {'equal' if figure['tokens_equal'] else 'DIFFER'}")
    return told + misses(figure)


def _stratum(thinks: Iterable[Line], batch: int, at: int) -> dict[str, Any] | None:
    """Thinks of one batch whose context is from `at` tokens to the next bound."""
    end = next((bound for bound in CONTEXTS if bound > at), 1 << 30)
    rows = [one for one in thinks if one["batch"] == batch and at <= one["context"] < end]
    ratios = _ratios(rows)
    if not ratios:
        return None
    with_drafts = [one for one in rows if one["mode"] == "drafts"]
    drafted, accepted = (sum(one[name] for one in with_drafts) for name in ("drafted", "accepted"))
    tokens = sum(one["tokens"] for one in with_drafts)
    return {
        "batch": batch,
        "context": at,
        "thinks": len(ratios),
        "accepted": round(accepted / drafted, 3) if drafted else None,
        "tokens_per_step": round(tokens / (tokens - accepted), 3),
        "speedup": round(statistics.median(ratios), 3),
    }


def _ratios(thinks: Iterable[Line]) -> list[float]:
    seconds: dict[tuple[Any, ...], dict[str, float]] = {}
    for one in thinks:
        key = (one["batch"], one["group"], one["session"], one["turn"])
        seconds.setdefault(key, {})[one["mode"]] = one["seconds"]
    return [pair["plain"] / pair["drafts"] for pair in seconds.values()]


def _names(thinks: Iterable[Line]) -> list[str]:
    return sorted({one["session"] for one in thinks})


def _whole(thinks: Iterable[Line]) -> float:
    """All of them together."""
    seconds = dict.fromkeys(MODES, 0.0)
    for one in thinks:
        seconds[one["mode"]] += one["seconds"]
    return seconds["plain"] / seconds["drafts"]


def _equal(lines: list[Line]) -> bool:
    said: dict[tuple[Any, ...], set[str]] = {}
    for one in only(lines, "think"):
        said.setdefault((one["batch"], one["group"], one["session"], one["turn"]), set()).add(one["said"])
    for one in only(lines, "free"):
        said.setdefault(("free", one["number"]), set()).add(str(one["ids"]))
    return bool(said) and all(len(texts) == 1 for texts in said.values())
