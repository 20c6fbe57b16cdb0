"""The console bench's figures are the worst page's, and evidence that was made better is seen."""

from __future__ import annotations

from pathlib import Path

from bench import console_figures, evidence
from bench.console_figures import FEW, MANY, figures, is_green, misses

LINES = [
    {"kind": "page", "page": page, "of": of, "ms": ms}
    for page, few, many in (("fleet", 10.0, 15.0), ("usage", 4.0, 7.0))
    for of, ms in ((FEW, few), (MANY, many), (FEW, few), (MANY, many))
]


def test_the_worst_page_is_the_figure() -> None:
    figure = figures(LINES)
    assert (figure["worst_ratio"], figure["worst_page"]) == (1.75, "usage")
    assert is_green(figure)
    slow = [{**line, "ms": line["ms"] * (1.2 if line["of"] == MANY else 1)} for line in LINES]
    assert misses(figures(slow)) == ["usage takes 2.1 times as long; 2.0 is the most"]
    assert not is_green(figures([]))


def test_evidence_that_was_altered_is_red(tmp_path: Path) -> None:
    path = tmp_path / "console.jsonl"
    evidence.leave(path, LINES)
    assert is_green(console_figures.figures(*evidence.read(path)))
    evidence.alter(path, "page", "ms", 0.5)
    assert misses(console_figures.figures(*evidence.read(path))) == ["the evidence is not what was measured"]
