"""The console bench's figures, computed from evidence alone, and the bar that they are held to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.evidence import Line, only

MOST_RATIO = 2.0
FEW, MANY = 10, 10_000  # sessions


def figures(lines: Sequence[Line], sealed: bool = True) -> dict[str, Any]:
    pages = {}
    for name in dict.fromkeys(line["page"] for line in only(lines, "page")):
        few, many = (
            statistics.median(line["ms"] for line in only(lines, "page") if (line["page"], line["of"]) == (name, of))
            for of in (FEW, MANY)
        )
        pages[name] = {"few_ms": round(few, 2), "many_ms": round(many, 2), "ratio": round(many / few, 2)}
    worst = max(pages, key=lambda name: pages[name]["ratio"]) if pages else None
    return {
        "worst_ratio": pages[worst]["ratio"] if worst else None,
        "worst_page": worst,
        "sessions": MANY,
        "pages": pages,
        "sealed": sealed,
    }


def misses(figure: dict[str, Any]) -> list[str]:
    missed = []
    if figure["worst_ratio"] is None or figure["worst_ratio"] > MOST_RATIO:
        missed.append(f"{figure['worst_page']} takes {figure['worst_ratio']} times as long; {MOST_RATIO} is the most")
    if not figure["sealed"]:
        missed.append("the evidence is not what was measured")
    return missed


def is_green(figure: dict[str, Any]) -> bool:
    return not misses(figure)


def report(figure: dict[str, Any]) -> list[str]:
    rows = [f"{'page':<24}{'ten':>10}{'10,000':>10}{'ratio':>8}"]
    for name, page in figure["pages"].items():
        rows.append(f"{name:<24}{page['few_ms']:>8.1f} ms{page['many_ms']:>7.1f} ms{page['ratio']:>7.2f}")
    return [*rows, f"{'worst':<24}{figure['worst_ratio']:>28.2f}"]
