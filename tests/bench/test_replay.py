"""The replay in its short form, and its sabotage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import evidence
from bench.replay import Wanted, measure
from bench.replay_figures import figures, misses, report, tokens
from bench.replay_play import MODES, NONE, TIERS
from bench.replay_sessions import ANSWER_TOKENS, from_shapes, from_trace, result_after
from tests.bench.support import verified
from tests.engine.conftest import MODELS, model_path

Lines = list[dict[str, Any]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two sessions of about 700 tokens."""
    path = tmp_path / "trace.jsonl"
    lengths = [("system", 400), ("assistant", 12), ("tool", 200), ("assistant", 8)]
    messages = [{"role": role, "content": "word " * count} for role, count in lengths]
    rows = [{"id": name, "messages": messages, "tool_seconds": [10.0]} for name in ("a", "b")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def measured(trace: Path, sabotage: str | None = None) -> Lines:
    return await measure(Wanted(model_path(MODELS[0]), trace, 2, 2, 1, 1024, 0.02, 2, sabotage))


@pytest.mark.model
async def test_a_replay_says_the_same_with_tiers_and_without_and_accounts_for_every_token(
    trace: Path, tmp_path: Path
) -> None:
    lines = await measured(trace)
    figure = figures(lines)
    assert figure["tokens_equal"]
    assert (figure["sessions"], figure["wakes"]) == (2, 2)
    assert figure["integrity"] == ["ok"]
    for mode in MODES:
        assert sum(figure["tokens"][mode].values()) >= 2 * (400 + 412 + 612)  # prompt, assistant's turn, tool result
    assert figure["tokens"][NONE]["host"] == figure["tokens"][NONE]["nvme"] == 0
    evidence.leave(tmp_path / "replay.jsonl", lines)
    assert verified(tmp_path)[1] == json.loads(json.dumps(figure))


@pytest.mark.model
async def test_a_foreign_prompt_turns_the_figure_red(trace: Path) -> None:
    figure = figures(await measured(trace, "foreign"))
    assert not figure["tokens_equal"]
    assert "tokens with tiers are not those without" in misses(figure)


def think(mode: str, turn: int, **changed: Any) -> dict[str, Any]:
    sources = {"device": 96, "host": 0, "nvme": 0, "shared": 0, "recomputed": 0, "computed": 10}
    return {
        "kind": "think",
        "mode": mode,
        "session": "s",
        "turn": turn,
        "first_token_s": 0.1 if mode == TIERS else 0.4,
        "tokens": [1, 2],
        "sources": sources,
        "preempted": 0,
        "waited": {"tokens": 100, "device": 2, "host": 0, "nvme": 5} if turn else None,
        **changed,
    }


def run() -> Lines:
    lines: Lines = [{"kind": "about", "model": "m", "threads": 2, "from": "x", "together": 1}]
    lines[0] |= {"pool_tokens": 64, "scale": 1.0}
    lines += [{"kind": "after", "integrity": "ok"}]
    return [*lines, *(think(mode, turn) for mode in MODES for turn in (0, 1))]


def test_what_a_prefetch_brought_counts_for_the_tier_that_had_it() -> None:
    counted = tokens(run(), TIERS)
    assert (counted["nvme"], counted["device"], counted["computed"]) == (64, 96 + 32, 20)
    assert sum(counted.values()) == 2 * 106


def test_only_first_tokens_after_a_tool_count() -> None:
    lines = [line | {"first_token_s": 9.0} if line.get("turn") == 0 else line for line in run()]
    assert figures(lines)["none_over_tiers"] == 4.0
    assert not misses(figures(lines))


@pytest.mark.parametrize(
    ("changed", "red"),
    [
        ({"tokens": [7]}, "tokens with tiers are not those without"),
        ({"first_token_s": 2.0}, "first token comes 0.2 times"),
        ({"waited": None}, "nothing came back from a tier"),
    ],
)
def test_each_miss_is_named(changed: dict[str, Any], red: str) -> None:
    lines = [line | changed if line.get("mode") == TIERS and line.get("turn") else line for line in run()]
    missed = misses(figures(lines))
    assert [miss for miss in missed if red in miss]
    assert [text for text in report(lines, figures(lines)) if red in text]


def test_a_recording_becomes_lengths_and_pauses(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    said = ["system", "user", "assistant", "tool", "user", "assistant", "tool", "assistant"]
    messages = [{"role": role, "content": "word " * (number + 1)} for number, role in enumerate(said)]
    path.write_text(json.dumps({"id": "a", "messages": messages, "tool_seconds": [0.5, None]}) + "\n")
    (session,) = from_trace(path, lambda text: len(text.split()))
    assert (session.name, session.prompt) == ("a", 1 + 2 + 8)
    assert [(step.out, step.result) for step in session.steps] == [(7, 4 + 5 + 8), (10, 11)]
    assert session.steps[0].pause_s == 0.5
    assert session.steps[1].pause_s > 0


def test_a_session_is_cut_where_the_context_ends() -> None:
    for session in from_shapes():
        cut = session.cut(100, 4096)
        total = cut.prompt + sum(step.out + step.result for step in cut.steps)
        assert total + ANSWER_TOKENS <= 4096
        assert session.cut(2, 1 << 20).steps == session.steps[:2]


def test_a_tool_result_ends_with_a_piece_of_the_transcript() -> None:
    transcript = list(range(500))
    for length in (5, 64):
        result = result_after(transcript, "x", length)
        assert len(result) == length
        assert result[-3:] == list(range(result[-3], result[-3] + 3))
