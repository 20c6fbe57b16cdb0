from __future__ import annotations

from typing import Any

import pytest

from bench.eval_figures import figures, is_green, misses, wilson, worse_p
from bench.eval_tasks import QUESTIONS, TOOL_TASKS


def said_by(mode: str, *, wrong: int = 0, kl: float = 0.01) -> list[dict[str, Any]]:
    """A mode that gets everything right but the first `wrong` tasks and questions."""
    calls = [{"name": t.tool, "arguments": dict(t.arguments)} if n >= wrong else None for n, t in enumerate(TOOL_TASKS)]
    lines: list[dict[str, Any]] = [
        {"kind": "tool", "task": task.key, "call": call} for task, call in zip(TOOL_TASKS, calls, strict=True)
    ]
    for number, question in enumerate(QUESTIONS[:10]):
        said = "nothing" if number < wrong else question.answer.split("|")[0]
        lines.append({"kind": "answer", "question": question.key, "said": said})
    lines += [{"kind": "position", "at": at, "same": at % 20 != 0, "kl": kl} for at in range(100)]
    return [{**line, "mode": mode, "model": "m"} for line in lines]


def test_a_mode_that_does_as_fp32_does_is_green():
    figure = figures([*said_by("fp32"), *said_by("w4a8")])
    assert figure["modes"]["m/w4a8"]["call"] == [36, 36]
    assert figure["modes"]["m/w4a8"]["answer"] == [10, 10]
    assert figure["modes"]["m/w4a8"]["top1"] == 0.95
    assert is_green(figure)


def test_a_mode_that_loses_tasks_is_red_by_the_sign_test_and_by_its_disagreement():
    figure = figures([*said_by("fp32"), *said_by("w4a8", wrong=4)])
    row = figure["modes"]["m/w4a8"]
    assert (row["lost"], row["won"]) == (8, 0)
    assert row["same_tool"] < 0.9
    assert [miss.split(":")[1].split()[0] for miss in misses(figure)] == ["same_tool", "worse_p"]


def test_a_mode_that_wins_as_much_as_it_loses_is_not_worse():
    figure = figures([*said_by("fp32", wrong=4), *said_by("w4a8")])
    assert figure["modes"]["m/w4a8"]["won"] == 8
    assert figure["modes"]["m/w4a8"]["worse_p"] == 1.0


def test_a_divergence_above_the_bar_is_red():
    figure = figures([*said_by("fp32"), *said_by("w4a8", kl=0.03)])
    assert any("kl_mean" in miss for miss in misses(figure))


def test_fp32_alone_judges_nothing_and_is_red():
    assert misses(figures(said_by("fp32"))) == ["no mode was judged"]


def test_altered_evidence_is_red():
    assert not is_green(figures([*said_by("fp32"), *said_by("w4a8")], sealed=False))


def test_the_wilson_interval_is_that_of_the_textbook():
    low, high = wilson(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == pytest.approx(1.0)


def test_the_sign_test_counts_tails_exactly():
    assert worse_p(0, 0) == 1.0
    assert worse_p(5, 0) == 1 / 32
    assert worse_p(3, 1) == 5 / 16
