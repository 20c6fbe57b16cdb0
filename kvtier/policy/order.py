"""Who is served first of those that wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.policy.values import Prefill, SessionView

OVERTAKEN_AT_MOST = 16
"""Whoever was overtaken so often by later arrivals goes first: no length of work waits for ever."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """`since_s`: when it came. `rank`: least first; ours is `left_s`. `overtaken`: later arrivals served before it."""

    id: str
    since_s: float
    rank: float
    overtaken: int = 0


def first_served(waiting: Sequence[Waiting]) -> str:
    """The id to serve next.

    Ranked by the prefill that is left (Schrage 1968: shortest remaining processing time gives the least mean wait), a
    session whose KV is at hand goes before one that has to be computed again, so that a miss delays nobody but its own.
    """
    overdue = [one for one in waiting if one.overtaken >= OVERTAKEN_AT_MOST]
    if overdue:
        return min(overdue, key=lambda one: one.since_s).id
    return min(waiting, key=lambda one: (one.rank, one.since_s)).id


def left_s(session: SessionView, new_tokens: int, prefill: Prefill) -> float:
    """Seconds of prefill before its first token: what its copy or the device lacks, and the new tokens."""
    ends = session.tokens + new_tokens
    if session.resident:
        return prefill.seconds(ends, session.tokens)
    return prefill.seconds(session.copy_from) + prefill.seconds(ends, session.copy_to)
