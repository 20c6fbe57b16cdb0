"""A flat median with a broken tail: who did it (systems: the tail doctor).

Every long wait is made of seconds by cause (engine.spans). The suspects are gone through in a fixed order, each ruled
out or charged with its share of all long waits together, so that what explains most by itself comes with what it
explains, and what explains nothing is said to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from engine.doctor.figures import Figures, Wait
from engine.doctor.findings import Finding, Remedy, Report, Value, found

LEAST_WAITS: Final = 3  # one or two are an accident
SELDOM: Final = 500  # intervals for each of them are no broken tail
CHARGED: Final = 0.2  # of the seconds of all long waits
PART: Final = "tail"


@dataclass(frozen=True)
class Suspect:
    """`cause`: as engine.spans calls it."""

    name: str
    cause: str
    words: str
    remedies: tuple[Remedy, ...]


_POOL = Remedy("see `tenuto doctor pool`", "pages for those that are sent away", "as each of its remedies")
SUSPECTS: Final = (
    Suspect(
        "tail.queueing",
        "queue",
        "waiting to be admitted",
        (
            Remedy("tenuto tenants limit TENANT --open-sessions N", "fewer requests that arrive together", "none"),
            Remedy(
                "TENUTO_NODES, or `tenuto node` on another machine", "half the queue with twice the nodes", "a node"
            ),
        ),
    ),
    Suspect(
        "tail.prefill",
        "prefill",
        "somebody else's prompt in the same steps",
        (
            Remedy(
                "the same system prompt and tools first in every session", "prefixes are found, not computed", "none"
            ),
            Remedy("context_policy: drop_tool_output", "shorter prompts after tools", "old outputs are dropped"),
            Remedy("TENUTO_NODES, or `tenuto node` on another machine", "fewer prompts beside each stream", "a node"),
        ),
    ),
    Suspect(
        "tail.preemption", "preemption", "being sent back for want of pages, or pages copied out in haste", (_POOL,)
    ),
    Suspect(
        "tail.host_stall",
        "host",
        "the host between two steps",
        (
            Remedy("TENUTO_ENGINE_THREADS below the number of cores", "a core for whatever is not a step", "restart"),
            Remedy("move what else runs on this machine", "the compute thread is not held up", "a place for it"),
        ),
    ),
    Suspect(
        "tail.tier_io",
        "tier_io",
        "pages on their way from or to a tier",
        (
            Remedy("TENUTO_HOST_KV_BYTES", "more comes from memory and less from disk", "memory; restart"),
            Remedy("a faster disk under TENUTO_HOME", "reads as fast as it has", "a disk"),
        ),
    ),
    Suspect(
        "tail.graph_miss",
        "graph_miss",
        "decode steps that were not recorded yet",
        (Remedy("nothing, while new batch sizes are still seen", "each is recorded once", "none"),),
    ),
)


def examine(figures: Figures) -> Report:
    """Findings of the tail."""
    spread, waits = figures.intervals, figures.waits
    if not spread.count and not waits:
        return Report(PART, notes=("no tokens have been sampled yet, so there is no tail to look at",))
    head = f"{spread.count} intervals between tokens: median {_ms(spread.p50_s)}, p99 {_ms(spread.p99_s)}"
    if len(waits) < max(LEAST_WAITS, spread.count // SELDOM):
        return Report(PART, notes=(f"{head}; {len(waits)} long waits in ten minutes: the tail is whole",))
    over_s = {wait_cause: sum(wait.made_of[wait_cause] for wait in waits) for wait_cause in waits[0].made_of}
    total_s = sum(over_s.values()) or 1.0
    notes, findings = [f"{head}; {len(waits)} long waits in ten minutes"], []
    for suspect in SUSPECTS:
        share = over_s[suspect.cause] / total_s
        if share < CHARGED:
            notes.append(f"ruled out: {suspect.words} ({share:.0%} of what the long waits were too long)")
        else:
            findings.append(_charge(figures, suspect, waits, share, over_s[suspect.cause]))
    rest = over_s["rest"] / total_s
    if not findings or rest >= 0.5:
        unknown = Suspect("tail.unexplained", "rest", "slow steps", ())
        findings.append(_charge(figures, unknown, waits, rest, over_s["rest"]))
    return Report(PART, tuple(findings), tuple(notes))


def _charge(figures: Figures, suspect: Suspect, waits: Sequence[Wait], share: float, seconds: float) -> Finding:
    mine = [wait for wait in waits if wait.made_of[suspect.cause] >= CHARGED * (wait.seconds - wait.usual_s)]
    evidence: dict[str, Value] = {
        "waits": len(mine),
        "share": round(share, 3),
        "seconds": round(seconds, 4),
        "p50_s": figures.intervals.p50_s,
        "p99_s": figures.intervals.p99_s,
        "longest_s": round(max((wait.seconds for wait in mine), default=0.0), 4),
        **_more(figures, suspect.name, waits),
    }
    cause = f"{share:.0%} of what {len(waits)} long waits were too long went into {suspect.words}"
    return found(suspect.name, evidence, cause, suspect.remedies)


def _more(figures: Figures, name: str, waits: Sequence[Wait]) -> Mapping[str, Value]:
    if name == "tail.tier_io":
        return {f"{tier}_tokens": sum(wait.tiers.get(tier, 0) for wait in waits) for tier in ("host", "nvme", "shared")}
    if name == "tail.graph_miss":
        return {"missed_steps": sum(step.graph == "missed" for step in figures.steps)}
    return {}


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f} ms"
