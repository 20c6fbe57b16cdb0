from __future__ import annotations

from bench import evidence
from bench.engine_figures import figures, is_green
from tests.bench.support import engine_lines, verified


def test_figures_are_recomputed_from_the_evidence(tmp_path):
    evidence.leave(tmp_path / "engine.jsonl", engine_lines())
    assert verified(tmp_path) == (0, figures(engine_lines()))


def test_evidence_that_was_altered_is_red_whatever_its_figures(tmp_path):
    path = tmp_path / "engine.jsonl"
    evidence.leave(path, engine_lines())
    evidence.alter(path, "timing", "seconds", 0.5)
    status, figure = verified(tmp_path)
    assert status == 1
    assert figure["sealed"] is False
    assert not is_green(figure)


def test_evidence_that_lost_a_line_is_not_sealed(tmp_path):
    path = tmp_path / "engine.jsonl"
    evidence.leave(path, engine_lines())
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3] + lines[4:]) + "\n")
    assert evidence.read(path)[1] is False
