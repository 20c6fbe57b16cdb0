"""The eval's figures, computed from evidence alone, and what makes a mode good enough."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench.eval_tasks import QUESTIONS, TOOL_TASKS, right_answer, right_call, right_tool
from bench.evidence import Line, only

REFERENCE = "fp32"
# A mode is judged by these against fp32, on every model. They are judgements: on SmolLM2 bf16 reaches 97 %, 97 %, 99 %
# and 0.0002, while weights rounded to four bits a second time reach 67 %, 47 %, 69 % and 0.36.
BARS = {
    "same_tool": (True, 0.9),
    "same_call": (True, 0.8),
    "top1": (True, 0.92),
    "kl_mean": (False, 0.02),
    "worse_p": (True, 0.05),
}
_TASKS = {task.key: task for task in TOOL_TASKS}
_QUESTIONS = {question.key: question for question in QUESTIONS}


def figures(lines: Sequence[Line], sealed: bool = True) -> dict[str, Any]:
    """Per model and mode; `modes` lists "model/mode"."""
    rows: dict[str, dict[str, Any]] = {}
    for model in dict.fromkeys(line["model"] for line in only(lines, "tool")):
        mine = [line for line in lines if line.get("model") == model]
        for mode in dict.fromkeys(line["mode"] for line in only(mine, "tool")):
            rows[f"{model}/{mode}"] = _row(mine, mode)
    absent = sorted(f"{line['model']}/{line['mode']}" for line in only(lines, "absent"))
    return {"modes": rows, "absent": absent, "sealed": sealed}


def is_green(figure: dict[str, Any]) -> bool:
    return not misses(figure)


def misses(figure: dict[str, Any]) -> list[str]:
    """Every bar that a mode does not reach, in words; nothing judged is a miss as well."""
    missed = []
    judged = {name: row for name, row in figure["modes"].items() if not name.endswith(f"/{REFERENCE}")}
    for name, row in judged.items():
        for bar, (more, limit) in BARS.items():
            value = row[bar]
            if value is None or (value < limit if more else value > limit):
                missed.append(f"{name}: {bar} is {value}, {'at least' if more else 'at most'} {limit} is wanted")
    if not judged:
        missed.append("no mode was judged")
    if not figure["sealed"]:
        missed.append("the evidence is not what was measured")
    return missed


def wilson(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval of a proportion (Wilson 1927), at 95 % by default."""
    if not total:
        return 0.0, 1.0
    rate = count / total
    middle = (rate + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def worse_p(lost: int, won: int) -> float:
    """One-sided sign test (McNemar, exact): how likely `lost` or more of lost + won are if neither is worse."""
    total = lost + won
    return math.fsum(math.comb(total, k) / 2.0**total for k in range(lost, total + 1))


def _row(lines: Sequence[Line], mode: str) -> dict[str, Any]:
    calls, base_calls = _calls(lines, mode), _calls(lines, REFERENCE)
    said, base_said = _said(lines, mode), _said(lines, REFERENCE)
    good = {key: right_call(_TASKS[key], call) for key, call in calls.items()}
    good |= {key: right_answer(_QUESTIONS[key], text) for key, text in said.items()}
    base = {key: right_call(_TASKS[key], call) for key, call in base_calls.items()}
    base |= {key: right_answer(_QUESTIONS[key], text) for key, text in base_said.items()}
    lost = sum(base.get(key, False) and not value for key, value in good.items())
    won = sum(value and not base.get(key, True) for key, value in good.items())
    positions = [line for line in only(lines, "position") if line["mode"] == mode]
    kl = [line["kl"] for line in positions]
    row: dict[str, Any] = {
        "tool": _count(right_tool(_TASKS[key], call) for key, call in calls.items()),
        "call": _count(good[key] for key in calls),
        "answer": _count(good[key] for key in said),
        "lost": lost,
        "won": won,
        "worse_p": round(worse_p(lost, won), 4),
        "same_tool": _rate(_name(calls[key]) == _name(base_calls.get(key)) for key in calls),
        "same_call": _rate(calls[key] == base_calls.get(key) for key in calls),
        "same_answer": _rate(said[key] == base_said.get(key) for key in said),
        "top1": _rate(line["same"] for line in positions),
        "positions": len(positions),
        "kl_mean": round(statistics.fmean(kl), 5) if kl else None,
        "kl_p99": round(sorted(kl)[math.ceil(0.99 * len(kl)) - 1], 5) if kl else None,
    }
    return row


def _calls(lines: Sequence[Line], mode: str) -> dict[str, Any]:
    return {line["task"]: line["call"] for line in only(lines, "tool") if line["mode"] == mode}


def _said(lines: Sequence[Line], mode: str) -> dict[str, str]:
    return {line["question"]: line["said"] for line in only(lines, "answer") if line["mode"] == mode}


def _name(call: Any) -> Any:
    return call["name"] if call else None


def _count(values: Any) -> list[int]:
    found = [bool(value) for value in values]
    return [sum(found), len(found)]


def _rate(values: Any) -> float | None:
    found = [bool(value) for value in values]
    return round(sum(found) / len(found), 4) if found else None
