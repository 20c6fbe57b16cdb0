"""What was used, summed when it is asked for. What nobody knows is None, and not taken for nothing."""

from __future__ import annotations

import asyncio
import datetime
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from runtime.store.database import Database

GroupBy = Literal["tenant", "session", "model", "day"]
SOURCES: Final = ("device", "host", "nvme", "shared", "recomputed", "computed")
CACHED: Final = SOURCES[:4]
TIERS: Final = ("host", "nvme", "shared")

_KEY: Final[Mapping[str, str]] = {
    "tenant": "tenant_id",
    "session": "session_id",
    "model": "model",
    "day": "to_char({at} AT TIME ZONE 'UTC', 'YYYY-MM-DD')",
}
_WINDOW: Final = "($1::text IS NULL OR tenant_id = $1)"
_OF_SESSION: Final = f"{_WINDOW} AND session_id = $4"
_THOUGHT: Final = "(kind = 'think' OR kind = 'compaction' AND sampled > 0)"  # what dropped outputs asked no engine
_STEPS: Final = f"""
SELECT {{key}} AS key, model, count(*) AS steps, count(DISTINCT session_id) AS sessions,
    sum(sampled)::bigint AS sampled, sum(tool_ms)::bigint AS tool_ms, sum(engine_ms) AS engine_ms,
    {", ".join(f"sum({source})::bigint AS {source}" for source in SOURCES)},
    count(*) FILTER (WHERE {_THOUGHT}) AS thinks, count(*) FILTER (WHERE {_THOUGHT} AND computed IS NULL) AS unknown,
    sum(prefill_ms) FILTER (WHERE {{clean}}) AS clean_ms,
    sum(recomputed + computed) FILTER (WHERE {{clean}})::bigint AS clean_tokens
FROM usage WHERE {_WINDOW} AND settled_at >= $2 AND settled_at < $3 GROUP BY 1, 2
""".replace("{clean}", "prefill_ms IS NOT NULL AND host + nvme + shared = 0 AND recomputed + computed > 0")
# Each interval, cut to what is asked for; by days also at midnight (UTC).
_LASTING: Final = f"""
SELECT {{key}} AS key, model, kind, CASE kind WHEN 'tier' THEN name END AS tier, count(*) AS pieces,
    sum(extract(epoch FROM till - since))::float8 AS seconds,
    (sum(bytes * extract(epoch FROM till - since)) / 3600)::float8 AS byte_hours
FROM (SELECT u.*, greatest(begun_at, $2, day) AS since,
        least(coalesce(ended_at, now()), $3, day + interval '24 hours') AS till
    FROM usage_intervals u, {{days}}
    WHERE {_WINDOW} AND begun_at < $3 AND coalesce(ended_at, now()) > $2) cut
WHERE till > since GROUP BY 1, 2, 3, 4
"""
_DAYS: Final = """LATERAL generate_series(date_trunc('day', greatest(begun_at, $2), 'UTC'),
        least(coalesce(ended_at, now()), $3), interval '24 hours') AS day"""
_WHOLE: Final = "(SELECT NULL::timestamptz AS day) AS whole"


@dataclass(frozen=True)
class Used:
    """What a group used of one model, by measure."""

    key: str
    model: str
    measures: Mapping[str, Any]


async def summed(
    db: Database,
    group_by: GroupBy,
    tenant_id: str | None,
    since: datetime.datetime,
    until: datetime.datetime,
    session_id: str | None = None,
) -> list[Used]:
    """By group and model. Steps count where they settled, what lasts (sandboxes, pages in tiers) while it lasted."""
    args: tuple[Any, ...] = (tenant_id, since, until)
    steps, lasting = _STEPS, _LASTING
    if session_id is not None:  # said only where it is asked for, so that the session's rows are found by their key
        args += (session_id,)
        steps, lasting = (text.replace(_WINDOW, _OF_SESSION) for text in (steps, lasting))
    days = _DAYS if group_by == "day" else _WHOLE
    stepped, lasted = await asyncio.gather(
        db.fetch(steps.format(key=_KEY[group_by].format(at="settled_at")), *args),
        db.fetch(lasting.format(key=_KEY[group_by].format(at="since"), days=days), *args),
    )
    speeds = _speeds(stepped)
    found: dict[tuple[str, str], dict[str, Any]] = defaultdict(_nothing)
    for row in stepped:
        found[row["key"], row["model"]] |= _of_steps(row, speeds.get(row["model"]))
    for row in lasted:
        found[row["key"], row["model"]] |= _of_intervals(row)
    return [Used(key, model, measures) for (key, model), measures in sorted(found.items())]


def _nothing() -> dict[str, Any]:
    return {
        "sampled_tokens": 0,
        "prefilled_tokens": 0,
        "cached_tokens": 0,
        **dict.fromkeys(SOURCES, 0),
        "engine_s": 0.0,
        "avoided_s": 0.0,
        **{f"{tier}_byte_hours": 0.0 for tier in TIERS},
        "sandbox_s": 0.0,
        "tool_s": 0.0,
        "sessions": 0,
        "steps": 0,
        "unknown_steps": 0,
    }


def _speeds(rows: list[Any]) -> dict[str, float]:
    """Seconds per prefilled token of each model, measured by prompts of which nothing had to be read from a tier."""
    ms: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    for row in rows:
        ms[row["model"]] += row["clean_ms"] or 0
        tokens[row["model"]] += row["clean_tokens"] or 0
    return {model: ms[model] / 1000 / count for model, count in tokens.items() if count}


def _of_steps(row: Mapping[str, Any], s_per_token: float | None) -> dict[str, Any]:
    known = not row["thinks"] or row["unknown"] < row["thinks"]
    sources = {source: (row[source] or 0) if known else None for source in SOURCES}
    cached = sum(row[source] or 0 for source in CACHED) if known else None
    engine_known = not row["thinks"] or row["engine_ms"] is not None
    avoided_s = 0.0 if cached == 0 else None
    if cached and s_per_token is not None:
        avoided_s = cached * s_per_token
    return {
        "sampled_tokens": row["sampled"],
        "prefilled_tokens": (row["recomputed"] or 0) + (row["computed"] or 0) if known else None,
        "cached_tokens": cached,
        **sources,
        "engine_s": (row["engine_ms"] or 0.0) / 1000 if engine_known else None,
        "avoided_s": avoided_s,
        "tool_s": row["tool_ms"] / 1000,
        "sessions": row["sessions"],
        "steps": row["steps"],
        "unknown_steps": row["unknown"],
    }


def _of_intervals(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["kind"] == "sandbox":
        return {"sandbox_s": row["seconds"]}
    return {f"{row['tier']}_byte_hours": row["byte_hours"]}
