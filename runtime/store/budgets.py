"""Budgets: what a session may use in all, a warning before the wall, and a question to its owner at it.

Measures: `tokens` (sampled), `steps`, `tool_s` (running tools) and `wall_s` (thinking or running tools; what waits for
people costs nothing). A limit of None is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import asyncpg

from runtime.store import events
from runtime.store.values import Event, Session

MEASURES = ("tokens", "steps", "wall_s", "tool_s")
WARN_AT = 0.8


def limits(session: Session) -> bool:
    """Whether there is any."""
    return any(limit_of(session, measure) is not None for measure in MEASURES)


def limit_of(session: Session, measure: str) -> float | None:
    value = session.budget.get(measure)
    return None if value is None else float(value)


def left(session: Session, measure: str) -> float | None:
    """How much may still be used; None: any amount."""
    limit = limit_of(session, measure)
    return None if limit is None else max(0.0, limit - session.spent[measure])


def exhausted(session: Session) -> dict[str, float | str] | None:
    """The first measure of which nothing is left, with its figures."""
    for measure in MEASURES:
        limit = limit_of(session, measure)
        if limit is not None and session.spent[measure] >= limit:
            return {"measure": measure, "limit": limit, "spent": session.spent[measure]}
    return None


def newly_near(session: Session, spent: Mapping[str, float]) -> list[Event]:
    """Warnings for measures that have passed WARN_AT of their limit and were not warned of yet."""
    warn_at = float(session.budget.get("warn_at") or WARN_AT)
    near = []
    for measure in MEASURES:
        limit = limit_of(session, measure)
        if limit is not None and measure not in session.warned and spent[measure] >= warn_at * limit:
            near.append(Event("budget.warning", {"measure": measure, "limit": limit, "spent": spent[measure]}))
    return near


def near_after(session: Session, *, tokens: int = 0, steps: int = 0) -> list[Event]:
    """Warnings that using so much more calls for."""
    spent = {
        **session.spent,
        "tokens": session.spent["tokens"] + tokens,
        "steps": session.spent["steps"] + steps,
    }
    return newly_near(session, spent)


async def warn(connection: asyncpg.Connection, session: Session) -> None:
    """Warn where a wall has come near. The session's row is locked."""
    near = newly_near(session, session.spent)
    if near:
        await connection.execute(
            "UPDATE sessions SET warned = warned || $2::text[] WHERE session_id = $1",
            session.session_id,
            [event.data["measure"] for event in near],
        )
        await events.append(connection, session.session_id, near)


async def raise_limits(connection: asyncpg.Connection, session: Session, limits: Mapping[str, float | None]) -> None:
    """Limits as they stand from now on; a measure that is raised is warned of anew."""
    await connection.execute(
        "UPDATE sessions SET budget = coalesce(budget, '{}'::jsonb) || $2::jsonb, warned = $3 WHERE session_id = $1",
        session.session_id,
        dict(limits),
        _still(session.warned, limits),
    )
    await events.append(connection, session.session_id, [Event("budget.raised", dict(limits))])


def _still(warned: Iterable[str], raised: Mapping[str, float | None]) -> list[str]:
    return [measure for measure in warned if measure not in raised]
