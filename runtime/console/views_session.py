"""One session: its steps in time, what was said, its checkpoints, its KV and its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from runtime.console.charts import lanes
from runtime.console.inside import Refused, segment
from runtime.console.show import Page
from runtime.console.visit import Visit, lacks, needed, rows
from runtime.kv_story import sentence
from workflows.states import TERMINAL

NEWEST: Final = 800  # events
LANES: Final = 80  # steps


async def session(visit: Visit) -> Page:
    """Everything that is known of it on one page; the newest of what is long."""
    tenant, name = visit.path("tenant"), visit.path("session")
    base = f"/tenants/{segment(tenant)}/sessions/{segment(name)}"
    about = await visit.api.get(base)
    after = max(0, about["last_event"] - NEWEST)
    steps, attempts, checkpoints, events, kv, decisions, questions, used = await visit.api.many(
        f"{base}/steps",
        f"{base}/attempts",
        f"{base}/checkpoints",
        (f"{base}/events", {"after": after, "limit": 1000}),
        f"{base}/kv",
        (f"{base}/kv/decisions", {"limit": 100}),
        (f"/tenants/{segment(tenant)}/approvals", {"session": name}),
        (f"/tenants/{segment(tenant)}/usage", {"group_by": "session", "session": name, "from": about["created_at"]}),
    )
    all_steps = rows(steps)
    return Page(
        "session.html",
        {
            "tenant": tenant,
            "session": about,
            "ended": about["state"] in TERMINAL,
            "lanes": lanes(all_steps[-LANES:]),
            "steps": len(all_steps),
            "attempts": [one for one in rows(attempts) if one["outcome"] != "completed" or one["attempt"] > 1],
            "checkpoints": _tree(rows(checkpoints)),
            "talk": talk(rows(events)),
            "cut": after > 0,
            "kv": None if isinstance(kv, Refused) else kv,
            "story": [(row["decided_at"], sentence(row)) for row in rows(decisions)],
            "questions": rows(questions),
            "sandbox": [event for event in rows(events) if event["type"].startswith("sandbox.")][-20:],
            "used": next(iter(rows(used)), None),
            "may": may(about),
            "lacks": lacks(steps=steps, events=events, kv=kv),
        },
    )


def may(about: Mapping[str, Any]) -> dict[str, str | None]:
    """Actions, and why one is not for now: None, it is."""
    state, over = about["state"], about["state"] in (*TERMINAL, "cancelling")
    ended = f"it is {state}" if over else None
    return {
        "session.pause": ended
        or (None if state in ("idle", "thinking", "tool_running", "waiting") else f"it is {state}"),
        "session.resume": ended or (None if state == "paused" else "it is not paused"),
        "session.retry": ended or (None if state == "failed" else "nothing of it has failed"),
        "session.interrupt": ended
        or (None if state in ("thinking", "tool_running", "waiting") else "no turn is under way"),
        "session.cancel": ended,
        "session.kv": ended or (None if about["node"] else "nothing of it has been computed yet"),
        "session.fork": None,
        "session.rewind": ended,
        "session.message": ended,
        "session.exec": ended or (None if state in ("idle", "paused") else "a turn is under way; pause it first"),
    }


def _tree(checkpoints: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Newest first, with how deep each lies off the branch that the session is on."""
    return [{**one, "off": not one["live"]} for one in reversed(checkpoints)]


def talk(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was said and done, from events: messages, what the model wrote, calls and their results."""
    said: list[dict[str, Any]] = []
    written: dict[int, dict[str, Any]] = {}
    calls: dict[tuple[int, int], dict[str, Any]] = {}
    for event in events:
        kind, data, step = event["type"], event["data"], event.get("step", 0)
        if kind == "message.accepted":
            said.append({"who": "user", "text": data["content"], "step": None, "at": event["created_at"]})
        elif kind == "model.delta":
            if step not in written:
                written[step] = {"who": "model", "text": "", "step": step, "at": event["created_at"]}
                said.append(written[step])
            before = written[step]["text"] if data.get("offset") else ""  # what was cut off may be said anew
            written[step]["text"] = before + data["text"]
        elif kind == "tool.requested":
            call = {"who": "tool", "step": step, "at": event["created_at"], "name": data["name"]}
            calls[step, data["call"]] = {**call, "arguments": data["arguments"], "result": None, "reason": None}
            said.append(calls[step, data["call"]])
        elif kind == "tool.settled" and (step, data["call"]) in calls:
            calls[step, data["call"]] |= {"result": data.get("preview", ""), "reason": data.get("reason")}
        elif kind in _TOLD:
            said.append({"who": "runtime", "text": _TOLD[kind], "step": step or None, "at": event["created_at"]})
    return said


_TOLD: Final = {
    "step.retrying": "the step is tried again",
    "step.failed": "the step failed",
    "tool.outcome_unknown": "nobody saw how the call ended",
    "session.rewound": "it was rewound",
    "session.paused": "it is paused",
    "session.failed": "it failed",
    "session.cancelled": "it was cancelled",
    "session.completed": "it is completed",
}


async def files(visit: Visit) -> Page:
    """The workspace at a checkpoint, and what differs between two."""
    tenant, name = visit.path("tenant"), visit.path("session")
    base = f"/tenants/{segment(tenant)}/sessions/{segment(name)}"
    about = needed(await visit.api.get(base))
    step, before = visit.query.get("step"), visit.query.get("from")
    found, diff, snapshots = await visit.api.many(
        (f"{base}/sandbox/files", {"recursive": True, "step": step, "limit": 500}),
        (f"{base}/sandbox/diff", {"from": before, "to": step, "limit": 500}),
        (f"{base}/sandbox/snapshots", {"limit": 1000}),
    )
    return Page(
        "files.html",
        {
            "tenant": tenant,
            "session": about,
            "files": rows(found),
            "diff": rows(diff),
            "snapshots": rows(snapshots),
            "step": step,
            "before": before,
            "lacks": lacks(files=found, changes=diff, checkpoints=snapshots),
        },
    )
