"""What is wrong with an engine, why, and what to do: findings from figures. Pure; loads no torch.

figures (what engine and node say)  ->  examine(part)  ->  Report: findings with evidence and remedies, and notes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from engine.doctor import memory, pool, precision, speculation, tail
from engine.doctor.figures import Death, Figures, Measured, Predicted, Spread, Step, Wait, figures, measured, predicted
from engine.doctor.findings import KNOWN, Finding, Known, Remedy, Report, Severity

PARTS: Final[Mapping[str, Callable[[Figures], Report]]] = {
    memory.PART: memory.examine,
    pool.PART: pool.examine,
    tail.PART: tail.examine,
    precision.PART: precision.examine,
    speculation.PART: speculation.examine,
}


# What a model server does, its own metrics tell; here are only the requests.
EXTERNAL: Final[Mapping[str, str]] = {
    memory.PART: "external: weights and KV are a model server's; this process only speaks for it",
    pool.PART: "external: there are no pages here, the KV is the model server's own",
    tail.PART: "external: what a token waits for happens in the model server; `tenuto engine` has the times seen here",
    precision.PART: "external: the model server chooses its numbers",
    speculation.PART: "external: drafts, if any, are the model server's",
}


def examine(what: Figures, part: str | None = None) -> list[Report]:
    """Of one part, or of all. Where the engine does not answer, only memory has something to say."""
    names = [part] if part is not None else list(PARTS)
    if what.answers and what.external:
        return [
            Report(name, PARTS[name](what).findings if name == memory.PART else (), (EXTERNAL[name],)) for name in names
        ]
    if what.answers:
        return [PARTS[name](what) for name in names]
    away = f"the engine does not answer: {what.why_not or 'nobody says why'}"
    return [replace(PARTS[name](what) if name == memory.PART else Report(name), away=away) for name in names]


__all__ = [
    "EXTERNAL",
    "KNOWN",
    "PARTS",
    "Death",
    "Figures",
    "Finding",
    "Known",
    "Measured",
    "Predicted",
    "Remedy",
    "Report",
    "Severity",
    "Spread",
    "Step",
    "Wait",
    "examine",
    "figures",
    "measured",
    "predicted",
]
