"""The engine bench in its short form on a tiny model, and its sabotage."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench import evidence
from bench.columns import Column
from bench.engine import Wanted, measure
from bench.engine_figures import RATIOS, figures, misses, table
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
    evidence.leave(tmp_path / "engine.jsonl", lines)
    assert verified(tmp_path)[1] == figure


def test_a_bit_that_differs_between_batch_and_lone_run_turns_it_red(model):
    figure = figures(lines_of(model, "unequal"))
    assert figure["bitwise"] is False
    assert any("logits" in miss for miss in misses(figure))
