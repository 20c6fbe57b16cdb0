"""The API bench's figures, computed from evidence alone, and the bars that they are held to."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from typing import Any

from bench.evidence import Line, only

LEAST_RATIO = 0.9


def figures(lines: Sequence[Line], sealed: bool = True) -> dict[str, Any]:
    seen = only(lines, "seen")
    logs = {(line["round"], line["session"]): line["ids"] for line in only(lines, "log")}
    lost = repeated = disordered = 0
    for line in seen:
        given: collections.Counter[int] = collections.Counter(line["ids"])
        log = logs[line["round"], line["session"]]
        lost += len(set(log) - set(given))
        repeated += sum(times - 1 for times in given.values())
        disordered += line["ids"] != sorted(line["ids"])
    late = [line["late_ms"] for line in seen if line["late_ms"] is not None and not line["slow"]]
    return {
        "streams": len(seen) // max(1, len({line["round"] for line in seen})),
        "events_lost": lost,
        "events_repeated": repeated,
        "streams_out_of_order": disordered,
        "events_given": sum(len(line["ids"]) for line in seen),
        "drops": sum(line["drops"] for line in seen),
        "token_rate_ratio": _ratio(lines),
        "tokens_per_s": {
            name: _median([rate(line) for line in only(lines, "round") if line["followed"] is followed])
            for name, followed in (("alone", False), ("followed", True))
        },
        "added_ms_p50": round(statistics.median(late), 1) if late else None,
        "rps": _requests(lines),
        "sealed": sealed,
    }


def rate(line: Line) -> float:
    return float(line["tokens"] / line["seconds"])


def _ratio(lines: Sequence[Line]) -> float | None:
    """Median over pairs of rounds: followed over alone."""
    alone = {line["round"]: rate(line) for line in only(lines, "round") if not line["followed"] and line["round"]}
    followed = [line for line in only(lines, "round") if line["followed"] and line["round"] in alone]
    pairs = [rate(line) / alone[line["round"]] for line in followed]
    return round(statistics.median(pairs), 3) if pairs else None


def _requests(lines: Sequence[Line]) -> float | None:
    found = only(lines, "requests")
    return round(found[0]["count"] / found[0]["seconds"], 1) if found else None


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 1) if values else None


def is_green(figure: dict[str, Any]) -> bool:
    return not misses(figure)


def misses(figure: dict[str, Any]) -> list[str]:
    missed = []
    if figure["events_lost"] or figure["events_repeated"] or figure["streams_out_of_order"]:
        missed.append(
            f"{figure['events_lost']} events were lost, {figure['events_repeated']} given twice, and"
            f" {figure['streams_out_of_order']} streams were out of order; none may be"
        )
    if not figure["events_given"] or not figure["drops"]:
        missed.append("no follower was given anything, or none was dropped: nothing was tried")
    ratio = figure["token_rate_ratio"]
    if ratio is None or ratio < LEAST_RATIO:
        missed.append(f"followed, the engine has {ratio} of its token rate; {LEAST_RATIO} is wanted")
    if not figure["sealed"]:
        missed.append("the evidence is not what was measured")
    return missed


def report(figure: dict[str, Any]) -> list[str]:
    """The figures as a table."""
    rates = figure["tokens_per_s"]
    return [
        f"{'streams':<28}{figure['streams']:>10}   dropped {figure['drops']} times, {figure['events_given']} events",
        f"{'events lost':<28}{figure['events_lost']:>10}",
        f"{'events given twice':<28}{figure['events_repeated']:>10}",
        f"{'streams out of order':<28}{figure['streams_out_of_order']:>10}",
        f"{'token rate, followed/alone':<28}{figure['token_rate_ratio']:>10}"
        f"   {rates['followed']} and {rates['alone']} tokens/s",
        f"{'from commit to reader, ms':<28}{figure['added_ms_p50']:>10}   median of medians; slow readers left out",
        f"{'GET of a session, per s':<28}{figure['rps']:>10}",
    ]
