"""The bench of drafts in its short form, its figures, and its sabotage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import evidence
from bench.speculate import Wanted, measure
from bench.speculate_figures import figures, is_green, misses, report
from tests.bench.support import verified
from tests.engine.conftest import MODELS, model_path


def think(mode: str, seconds: float, **changed: Any) -> dict[str, Any]:
    line = {"kind": "think", "batch": 1, "group": 0, "session": "a", "turn": 0, "mode": mode, "context": 2500}
    line |= {"longest_output": 900, "tokens": 50, "seconds": seconds, "drafted": 0, "accepted": 0, "said": "x"}
    return {**line, **({"drafted": 40, "accepted": 30} if mode == "drafts" else {}), **changed}


ABOUT = {"kind": "about", "model": "m", "dtype": "bf16", "backend": "cpu", "instruction_set": "x", "trace": "t"}


def test_figures_are_ratios_of_decoding_time() -> None:
    lines = [ABOUT, think("drafts", 1.0), think("plain", 1.8)]
    figure = figures(lines)
    assert (figure["speedup_median"], figure["worst"], figure["accepted"]) == (1.8, 1.8, 0.75)
    assert figure["strata"] == [
        {"batch": 1, "context": 2048, "thinks": 1, "accepted": 0.75, "tokens_per_step": 2.5, "speedup": 1.8}
    ]
    assert is_green(figure)
    assert report(lines, figure)[-1].startswith("worst session 1.8, tokens equal")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([think("drafts", 1.0), think("plain", 1.1)], "less than 1.3"),
        ([think("drafts", 1.0, batch=4), think("plain", 0.9, batch=4)], "a session runs at 0.9"),
        ([think("drafts", 1.0, said="y"), think("plain", 2.0)], "not what was said without"),
    ],
)
def test_what_is_slower_or_another_token_is_red(lines: list[dict[str, Any]], says: str) -> None:
    assert any(says in miss for miss in misses(figures([ABOUT, *lines])))


def trace(path: Path) -> Path:
    text = "the tide comes in at six and goes out at noon, " * 6
    messages = [
        {"role": "system", "content": "You repeat."},
        {"role": "user", "content": text},
        {"role": "assistant", "content": text[:120]},
    ]
    path.write_text(json.dumps({"id": "a", "messages": messages}) + "\n")
    return path


@pytest.mark.model
@pytest.mark.parametrize("sabotage", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_replay_is_equal_with_drafts_unless_they_are_taken_as_they_are(tmp_path: Path, sabotage: bool) -> None:
    lines = measure(Wanted(model_path(MODELS[0]), "bf16", trace(tmp_path / "t.jsonl"), 1, 1, (1,), 1, sabotage))
    figure = figures(lines)
    assert figure["tokens_equal"] is not sabotage
    evidence.leave(tmp_path / "speculate.jsonl", lines)
    assert verified(tmp_path)[1] == json.loads(json.dumps(figure))
