"""The figures of a run on a GPU, computed from evidence alone, and what turns it red."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.evidence import Line, only

LARGEST_DEVIATION = 0.25  # of logits from the CPU backend's, in their standard deviations; both compute in bf16
# On a GPU: the least fraction of a copy's bandwidth, by what a case's name begins with.
BARS = {"paged_decode bf16 16 ": 0.8, "paged_decode bf16 64 ": 0.8, "copy_pages gather": 0.9}
LEAST_HOST_RATIO = 3.0  # of the host's time for a step launched kernel by kernel over a replayed one
PARTS = ("copy", "check", "bits", "moved", "step", "logits", "session", "restore")  # kinds that every run leaves


def figures(lines: Sequence[Line], sealed: bool = True) -> dict[str, Any]:
    about = only(lines, "about")
    checks = only(lines, "check")
    figure = {
        "gpu": about[0]["gpu"] if about else None,
        "dry": bool(about and about[0]["dry"]),
        "copy_gb_s": copy_gb_s(lines),
        "link_gb_s": {x["way"]: _gb_s(x["bytes"], x["seconds"]) for x in only(lines, "link")},
        "checks": len(checks),
        "wrong": sum(not _right(line) for line in checks),
        "bits": {x["what"]: bool(x["logits"] and x["pages"]) for x in only(lines, "bits")},
        "of_copy": of_copy(lines),
        "steps_ms": _steps(lines, "seconds", 1e3),
        "host_us": _steps(lines, "host_seconds", 1e6),
        "logits": logits(lines),
        "restore_s": restores(lines),
        "session": sessions(lines),
        "left_out": [line["what"] for line in only(lines, "skipped")],
        "sealed": sealed,
    }
    return {**figure, "missed": _misses(lines, figure)}


def is_green(figure: dict[str, Any]) -> bool:
    return not figure["missed"]


def misses(lines: Sequence[Line], sealed: bool = True) -> list[str]:
    """What is wrong, in sentences."""
    return list(figures(lines, sealed)["missed"])


def _misses(lines: Sequence[Line], figure: dict[str, Any]) -> list[str]:
    missed = [
        f"{line['kernel']} ({line['sample']}): an error of {line['worst']:.2e}, {line['bound']:.0e} is allowed"
        for line in only(lines, "check")
        if not _right(line)
    ]
    missed += [
        f"a token {what} has other bits than in its whole prompt" for what, same in figure["bits"].items() if not same
    ]
    missed += [] if figure["dry"] else _slow(figure)
    missed += [f"{line['what']} failed: {line['error']}" for line in only(lines, "failed")]
    missed += [f"{line['what']} was left out: {line['reason']}" for line in only(lines, "skipped")]
    missed += [f"the run left no {kind}" for kind in PARTS if not only(lines, kind)]
    if figure["logits"] and not figure["logits"]["agrees"]:
        missed.append(f"logits are not those of the CPU backend: {figure['logits']}")
    missed += [
        f"{length} tokens give other logits after they came back" for length, one in figure["restore_s"].items()
        if not one["equal"]
    ]  # fmt: skip
    missed += [
        f"a session that was killed, its pages in {tier}, did not go on as one that was not: {one}"
        for tier, one in figure["session"].items()
        if not one["equal"]
    ]
    if not figure["sealed"]:
        missed.append("the evidence is not what was measured")
    return missed


def _slow(figure: dict[str, Any]) -> list[str]:
    """What is slower than it may be."""
    missed = [
        f"{name} moves bytes at {part} of a copy's bandwidth; {least} is wanted"
        for name, part in figure["of_copy"].items()
        for start, least in BARS.items()
        if name.startswith(start) and part < least
    ]
    for batch, host in figure["host_us"].items():
        if host["eager"] < LEAST_HOST_RATIO * host["graph"]:
            missed.append(
                f"a replayed step of {batch} takes {host['graph']} us of the host, an eager one {host['eager']}"
            )
    return missed


def _right(line: Line) -> bool:
    return bool(line["worst"] <= line["bound"])  # NaN is not


def copy_gb_s(lines: Sequence[Line]) -> float | None:
    """What is read and written: twice the bytes that are copied."""
    copies = only(lines, "copy")
    return _gb_s(2 * copies[0]["bytes"], copies[0]["seconds"]) if copies else None


def of_copy(lines: Sequence[Line]) -> dict[str, float]:
    """Of each sample and case that moves bytes, its bandwidth over that of a copy."""
    copied = copy_gb_s(lines)
    if not copied:
        return {}
    return {
        f"{line['kernel']} {line.get('case') or line['sample']}": round(
            _gb_s(line["bytes"], line["seconds"]) / copied, 3
        )
        for line in lines
        if line["kind"] in ("speed", "moved")
    }


def _steps(lines: Sequence[Line], field: str, unit: float) -> dict[str, dict[str, float]]:
    """By batch: eager and graph."""
    found: dict[str, dict[str, float]] = {}
    for line in only(lines, "step"):
        found.setdefault(str(line["batch"]), {})[line["way"]] = round(unit * statistics.median(line[field]), 3)
    return found


def logits(lines: Sequence[Line]) -> dict[str, Any] | None:
    """A token may be another one only where the CPU's own lead is within what both may deviate."""
    rows = only(lines, "logits")
    if not rows:
        return None
    worst = max(row["worst"] / row["spread"] for row in rows)
    other = [row for row in rows if row["token"] != row["token_cpu"]]
    close = all(row["lead_cpu"] <= 2 * row["worst"] for row in other)
    return {
        "model": rows[0]["model"],
        "rows": len(rows),
        "worst_deviation": round(worst, 4),
        "same_token": len(rows) - len(other),
        "agrees": bool(worst <= LARGEST_DEVIATION and close),
    }


def restores(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """By tokens: median seconds of each way to have the pages again, and whether what came back was the same."""
    found: dict[str, dict[str, Any]] = {}
    for line in only(lines, "recompute"):
        found[str(line["tokens"])] = {"recompute": round(statistics.median(line["seconds"]), 5), "equal": True}
    for line in only(lines, "restore"):
        one = found.setdefault(str(line["tokens"]), {"equal": True})
        one[line["tier"]] = round(statistics.median(line["seconds"]), 5)
        one["equal"] = bool(one["equal"] and line["equal"])
    return found


def sessions(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """By the tier that a killed session's pages were in: whether it went on as one that was not disturbed."""
    return {
        line["tier"]: {
            "equal": bool(line["undisturbed"] == line["killed"] and line["sources"][line["tier"]] > 0),
            "restored_tokens": line["sources"][line["tier"]],
            "recomputed_tokens": line["sources"]["recomputed"],
            "first_token_s": round(line["first_token_s"], 3),
        }
        for line in only(lines, "session")
    }


def _gb_s(size: float, seconds: Sequence[float]) -> float:
    return round(size / max(statistics.median(seconds), 1e-9) / 1e9, 2)


def report(lines: Sequence[Line]) -> list[str]:
    """The summary, for people."""
    figure = figures(lines)
    text = [f"{figure['checks']} samples of kernels checked, {figure['wrong']} wrong"]
    text += [] if figure["dry"] else _speeds(figure)
    text.append(f"bits of a whole prompt again: {figure['bits']}")
    text.append(f"logits beside the CPU: {figure['logits']}")
    for length, one in figure["restore_s"].items():
        ways = ", ".join(f"{way} {value} s" for way, value in one.items() if way != "equal")
        text.append(f"{length:>6} tokens: {ways}, {'the same' if one['equal'] else 'OTHER'} logits")
    text += [f"a killed session with its pages in {tier}: {one}" for tier, one in figure["session"].items()]
    return text


def _speeds(figure: dict[str, Any]) -> list[str]:
    """What only a GPU makes sense of."""
    text = [f"{figure['gpu']}: copies at {figure['copy_gb_s']} GB/s, links {figure['link_gb_s']}"]
    text += [f"    {name:<44}{part:>7.3f} of copy" for name, part in figure["of_copy"].items()]
    for batch, ways in figure["steps_ms"].items():
        host = figure["host_us"][batch]
        text.append(
            f"decode of {batch:>3}: "
            + ", ".join(f"{way} {ms:.2f} ms ({host[way]:.0f} us of the host)" for way, ms in ways.items())
        )
    return text
