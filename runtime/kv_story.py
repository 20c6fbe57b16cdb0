"""The decision log of a session as a story, for a person: `tenuto kv explain`."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

_PLACES = {"host": "host memory", "nvme": "NVMe", "shared": "the shared store", "device": "the device"}
_ACTIONS = {
    "store": "copied {what} to {place}",
    "evict": "let {place} forget {what}",
    "restore": "read {what} back from {place}",
    "prefetch": "read {what} back from {place} ahead of its turn",
    "recompute": "computed {tokens} tokens again",
    "pin": "pinned {what} on {place}",
    "keep": "left {what} on {place} without a copy",
    "drop": "forgot {what} {place}",
}
_WHY = {
    "tool_started": "a tool started",
    "tool_ended": "the tool ended",
    "scheduled": "it was its turn",
    "pressure": "others needed the place",
    "asked": "it was asked for",
    "api": "it was asked for over the API",
}


def story(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line per decision: when, in which step, what and why, and what it was expected to take and took."""
    lines, day = [], ""
    for row in rows:
        at = datetime.datetime.fromisoformat(row["decided_at"]).astimezone()
        if day != (day := f"{at:%Y-%m-%d}"):
            lines.append(day)
        step = f"step {row['step']}" if row["step"] else ""
        lines.append(f"  {at:%H:%M:%S.%f}"[:-3] + f"  {step:<8} {sentence(row)}")
    return lines


def sentence(row: Mapping[str, Any]) -> str:
    """What was decided, and what came of it."""
    what = f"{row['tokens']:,} tokens ({row['bytes'] / 1e6:,.1f} MB)"
    place = " and ".join(_PLACES.get(one, one) for one in row["place"].split("+"))
    shape = _ACTIONS.get(row["action"], row["action"] + " of {what} at {place}")
    text = shape.format(what=what, place=place, tokens=f"{row['tokens']:,}")
    why = "its pages were gone" if row["action"] == "recompute" else _WHY.get(row["reason"], row["reason"])
    detail = f" ({row['detail']})" if row["detail"] else ""
    return f"{text}, because {why}{_outcome(row)}{detail}"


def _outcome(row: Mapping[str, Any]) -> str:
    if row["action"] == "evict":
        return _of_eviction(row)
    if row["status"] == "failed":
        return ": it failed"
    told = []
    if row["realised_s"] is not None and row["action"] not in ("pin", "keep"):
        told.append(f"took {_time(row['realised_s'])}")
    if row["predicted_s"] is not None and row["realised_s"] is not None and row["action"] != "pin":
        told.append(f"{_time(row['predicted_s'])} expected")
    if row["action"] in ("restore", "store", "prefetch") and row["instead_s"]:
        told.append(f"computing them takes {_time(row['instead_s'])}")
    if row["status"] == "open":
        told.append("under way")
    return ": " + "; ".join(told) if told else ""


def _of_eviction(row: Mapping[str, Any]) -> str:
    expected = "" if row["predicted_s"] is None else f": {_time(row['predicted_s'])} if it comes back"
    if row["status"] == "moot":
        return f"{expected}; it never did"
    if row["realised_s"] is None:
        return f"{expected}; it has not yet"
    return f"{expected}; it did, and that took {_time(row['realised_s'])}"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
