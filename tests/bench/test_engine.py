"""The engine bench in its short form on a tiny model, and its sabotage."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench import evidence
from bench.columns import Column
from bench.engine import Rounds, Wanted, measure
from bench.engine_figures import RATIOS, figures, misses, table
from bench.engine_report import report
from tests.bench.support import verified
from tests.engine.conftest import native_library, share_native
from tests.engine.tiny import write_tiny

TINY = (
    Column("prefill_512", 40),
    Column("prefill_2048", 64),
    Column("decode_128", 16, steps=3),
    Column("decode_2048", 144, steps=3),
    Column("batch8", 16, steps=2, sequences=8),
)


@dataclasses.dataclass(frozen=True)
class Tiny(Wanted):
    @property
    def columns(self) -> tuple[Column, ...]:
        return TINY


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    native_library()
    directory = tmp_path_factory.mktemp("bench")
    share_native(directory)
    return write_tiny(directory / "tiny.gguf")


def lines_of(model: Path, sabotage: str | None = None) -> list[evidence.Line]:
    wanted = Tiny(model, 2, 2, True, sabotage, peer="torch", ours=("bf16", "no_such_mode"), gap_modes=())
    return measure(wanted)


def test_every_engine_runs_every_column_and_the_figures_can_be_recomputed(model, tmp_path):
    lines = lines_of(model)
    figure = figures(lines)
    rows = {row["engine"]: row for row in table(lines)}
    assert set(rows) == {"ours/bf16", "torch/bf16"}
    assert all(row[column][1] == 2 for row in rows.values() for column in RATIOS)
    assert all(figure[column] > 0 for column in (*RATIOS, "ceiling_fraction_bf16"))
    assert figure["bitwise"] is True
    assert figure["absent"] == ["ours/no_such_mode"]
    text = report(lines, figure)
    assert any(line.startswith("| torch/bf16 | ") for line in text)
    assert any(line.startswith("absent: ours/no_such_mode") for line in text)
    evidence.leave(tmp_path / "engine.jsonl", lines)
    assert verified(tmp_path)[1] == figure


def test_a_bit_that_differs_between_batch_and_lone_run_turns_it_red(model):
    figure = figures(lines_of(model, "unequal"))
    assert figure["bitwise"] is False
    assert any("logits" in miss for miss in misses(figure))


class Neighbours:
    """Others who use these many cores, timing after timing."""

    def __init__(self, *cores: float) -> None:
        self._cores = iter(cores)

    def wait(self, patience_s: float) -> float:
        return 0.0

    def cores(self) -> float:
        return next(self._cores)


class Counting:
    def __init__(self) -> None:
        self.asked = 0

    def timing(self, column: str) -> evidence.Line:
        self.asked += 1
        return {"seconds": float(self.asked)}


@pytest.mark.parametrize(
    ("patience_s", "cores", "kept"),
    [(30.0, (0.0,), (1.0, 0.0)), (30.0, (1.5, 0.9, 0.1), (3.0, 0.1)), (0.0, (1.5,), (1.0, 1.5))],
)
def test_a_disturbed_timing_is_made_again_while_patience_lasts(patience_s, cores, kept):
    rounds = Rounds(Wanted(Path(), 1, 2, False, None), {"x": Counting()}, None, lambda lines: None)
    rounds.patience_s = patience_s
    timing = rounds._timing("x", "batch8", Neighbours(*cores))
    assert (timing["seconds"], timing["foreign_cores"]) == kept
