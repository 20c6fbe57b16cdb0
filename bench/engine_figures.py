"""The engine bench's figures, computed from evidence alone; a table of it for people; and what makes it green."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench.evidence import Line, only
from bench.llamacpp import refusals
from bench.quiet import DISTURBED_CORES

# figure -> (is more better, bar)
BARS = {
    "prefill_512": (True, 1.5),
    "prefill_2048": (True, 1.5),
    "decode_128": (True, 1.5),
    "decode_128_bf16": (True, 1.0),
    "batch8": (True, 2.5),
    "ceiling_fraction_bf16": (True, 0.85),
    "itl_p95_ratio": (False, 2.0),
}
RATIOS = ("prefill_512", "prefill_2048", "decode_128", "decode_2048", "batch8")
OURS, BF16 = "ours", "ours/bf16"
PURE = "_pure"  # a format that spares the head nothing: shown, and compared apart


def figures(lines: Sequence[Line], sealed: bool = True) -> dict[str, Any]:
    """Ratios of ours over the peer, the fastest of each per column; None where one cannot be had or is refused."""
    about = only(lines, "about")[0]
    rates = _rates(lines)
    peer = str(about["peer"])
    foreign = statistics.median([line["foreign_cores"] for line in only(lines, "timing")] or [0.0])
    refused = [reason for line in only(lines, "engine") if "system_info" in line for reason in refusals(line)]
    if foreign > DISTURBED_CORES and not about["quick"]:
        refused.append(f"other programs kept {foreign} cores busy; at most {DISTURBED_CORES} is quiet enough")
    found: dict[str, Any] = {}
    for column in RATIOS:
        found[column] = (
            None if refused else _ratio(rates, column, _best(rates, OURS, column), _best(rates, peer, column))
        )
        if column == "decode_128":
            found["decode_128_bf16"] = None if refused else _ratio(rates, column, BF16, f"{peer}/bf16")
            pure = None if refused else _ratio(rates, column, _best(rates, OURS, column), f"{peer}/q4_0{PURE}")
            found["decode_128_over_pure_q4_0"] = pure
    found["ceiling_fraction_bf16"] = _ceiling_fraction(lines, rates, int(about["matrix_bytes"]))
    found["itl_p95_ratio"] = _gap_ratio(lines)
    found["bitwise"] = _bitwise(lines)
    found["peer"] = peer
    found["foreign_cores"] = foreign
    found["refused"] = sorted(set(refused))
    found["absent"] = sorted(line["name"] for line in only(lines, "absent"))
    found["sealed"] = sealed
    return found


def is_green(figure: dict[str, Any]) -> bool:
    return not misses(figure)


def misses(figure: dict[str, Any]) -> list[str]:
    """Every bar that is not reached, in words."""
    missed = []
    for name, (more, bar) in BARS.items():
        value = figure[name]
        if value is None or (value < bar if more else value > bar):
            missed.append(f"{name} is {value}, {'at least' if more else 'at most'} {bar} is wanted")
    if not figure["bitwise"]:
        missed.append("logits of the batch differ from those of lone runs")
    if not figure["sealed"]:
        missed.append("the evidence is not what was measured")
    return missed + list(figure["refused"])


def table(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Per engine: its name, and per column the median tokens per second and how often it was measured."""
    rates = _rates(lines)
    return [
        {"engine": engine, **{column: _summary(rates.get((engine, column), {})) for column in RATIOS}}
        for engine in dict.fromkeys(line["engine"] for line in only(lines, "timing"))
    ]


def p95(values: Sequence[float]) -> float:
    """The nearest-rank 95th percentile."""
    ordered = sorted(values)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


def _summary(rounds: dict[int, float]) -> tuple[float, int] | None:
    return (statistics.median(rounds.values()), len(rounds)) if rounds else None


def _rates(lines: Sequence[Line]) -> dict[tuple[str, str], dict[int, float]]:
    """(engine, column) -> round -> tokens per second."""
    rates: dict[tuple[str, str], dict[int, float]] = {}
    for line in only(lines, "timing"):
        rates.setdefault((line["engine"], line["column"]), {})[line["round"]] = line["tokens"] / line["seconds"]
    return rates


def best(lines: Sequence[Line], family: str, column: str) -> str | None:
    """The engine of a family that is fastest in a column, among those measured most often there."""
    return _best(_rates(lines), family, column)


def _best(rates: dict[tuple[str, str], dict[int, float]], family: str, column: str) -> str | None:
    found = {
        engine: rounds
        for (engine, name), rounds in rates.items()
        if name == column and engine.startswith(f"{family}/") and not engine.endswith(PURE)
    }
    if not found:
        return None
    most = max(len(rounds) for rounds in found.values())
    finalists = {engine: rounds for engine, rounds in found.items() if len(rounds) == most}
    return max(finalists, key=lambda engine: statistics.median(finalists[engine].values()))


def _ratio(
    rates: dict[tuple[str, str], dict[int, float]], column: str, ours: str | None, theirs: str | None
) -> float | None:
    """The median, over the rounds that both ran, of the two rates' ratio."""
    mine, peers = rates.get((ours or "", column), {}), rates.get((theirs or "", column), {})
    pairs = [mine[number] / peers[number] for number in mine if number in peers]
    return round(statistics.median(pairs), 3) if pairs else None


def _ceiling_fraction(
    lines: Sequence[Line], rates: dict[tuple[str, str], dict[int, float]], matrix_bytes: int
) -> float | None:
    """Median over rounds of: bytes of weights that decode reads per second, over the best read of that round.

    Decode reads KV besides, which is not counted.
    """
    reads: dict[int, float] = {}
    for line in only(lines, "bandwidth"):
        reads[line["round"]] = max(reads.get(line["round"], 0.0), line["bytes_per_s"])
    decode = rates.get((BF16, "decode_128"), {})
    found = [decode[number] * matrix_bytes / reads[number] for number in decode if number in reads]
    return round(statistics.median(found), 3) if found else None


def _gap_ratio(lines: Sequence[Line]) -> float | None:
    """Per mode, the median over repeats of p95 beside a prompt over p95 without; the worst mode counts."""
    gaps = {(line["dtype"], line["repeat"], line["window"]): line["gaps_ms"] for line in only(lines, "gaps")}
    ratios: dict[str, list[float]] = {}
    for dtype, repeat, window in gaps:
        beside, calm = gaps.get((dtype, repeat, "beside")), gaps[dtype, repeat, window]
        if window == "calm" and beside and calm:
            ratios.setdefault(dtype, []).append(p95(beside) / p95(calm))
    return round(max(statistics.median(found) for found in ratios.values()), 3) if ratios else None


def _bitwise(lines: Sequence[Line]) -> bool:
    """Whether every mode of ours gave the same logits in the timed batches and alone; False if none was compared."""
    alone = {(line["engine"], line["column"]): line["rows"] for line in only(lines, "alone")}
    timed = [line for line in only(lines, "timing") if (line["engine"], line["column"]) in alone]
    modes = {line["engine"] for line in only(lines, "timing") if line["engine"].startswith(f"{OURS}/")}
    return (
        bool(modes)
        and modes == {engine for engine, _ in alone}
        and all(line["rows"] == alone[line["engine"], line["column"]] for line in timed)
    )
