"""Pictures as SVG, drawn here: they need no JavaScript, and no style of their own."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.console.show import moment, now


@dataclass(frozen=True)
class Share:
    """A part of a whole. `kind` names its colour."""

    name: str
    value: float
    kind: str


def shares(parts: Sequence[Share]) -> list[dict[str, Any]]:
    """Each with where it begins and how wide it is, in percent; none where there is nothing."""
    total = sum(part.value for part in parts)
    found, at = [], 0.0
    for part in parts:
        if part.value:
            wide = 100 * part.value / total
            found.append({"name": part.name, "value": part.value, "kind": part.kind, "x": at, "width": wide})
            at += wide
    return found


def lanes(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A lane for each step: where its bar lies between the first begin and the last end, in percent; under it where
    the KV came from that it began with."""
    if not steps:
        return []
    begins = [moment(step["started_at"]) for step in steps]
    ends = [moment(step["ended_at"]) if step["ended_at"] else now() for step in steps]
    first, whole_s = min(begins), max(0.001, (max(ends) - min(begins)).total_seconds())
    return [
        {
            **step,
            "x": 100 * (begin - first).total_seconds() / whole_s,
            "width": max(0.4, 100 * (end - begin).total_seconds() / whole_s),
            "seconds": (end - begin).total_seconds(),
            "wait_s": _wait(begin, ends[index - 1]) if index else 0.0,
            "kv": shares(_sources(step)),
        }
        for index, (step, begin, end) in enumerate(zip(steps, begins, ends, strict=True))
    ]


def _wait(begin: datetime.datetime, before: datetime.datetime) -> float:
    return max(0.0, (begin - before).total_seconds())


def _sources(step: Mapping[str, Any]) -> list[Share]:
    kv = (step["output"] or {}).get("kv") if isinstance(step["output"], dict) else None
    return [Share(name, value, name) for name, value in (kv or {}).items() if value]
