"""Where the record of a session stands: what the workflow decides by, read in one query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import asyncpg

from runtime.store.database import Database
from workflows.contract import Progress
from workflows.policies import Next, next_action
from workflows.states import TERMINAL, State
from workflows.states import Event as Move

# The message that the session is about, and what its user asked for with it; or later, with the results of calls that
# ran at the caller. $1 is the session.
ENTRY = """
(SELECT s.step_no, coalesce(s.output -> 'options', m.options) AS options FROM steps s LEFT JOIN messages m
    USING (message_id) WHERE s.session_id = $1 AND s.live AND s.state = 'completed'
    AND (s.kind = 'input' OR (s.kind = 'tool' AND s.output ? 'options'))
    ORDER BY s.step_no DESC LIMIT 1)
"""
SINCE_ENTRY = """
(SELECT count(*) FROM steps WHERE session_id = $1 AND live AND state = 'completed' AND kind = 'tool'
    AND step_no > coalesce(entry.step_no, 0) AND output ->> 'outcome' <> 'corrected') AS rounds,
(SELECT count(*) FROM steps WHERE session_id = $1 AND live AND state = 'completed' AND kind = 'tool'
    AND step_no > coalesce(entry.step_no, 0) AND output ->> 'outcome' = 'corrected') AS corrections
"""
_SQL = f"""
SELECT se.state AS session_state, se.waiting_for, se.config,
    (SELECT token_count FROM checkpoints WHERE session_id = $1 ORDER BY step_no DESC LIMIT 1) AS tokens,
    last.step_no, last.kind, last.state, last.output, entry.options,
    {SINCE_ENTRY},
    (SELECT extract(epoch FROM min(expires_at)) FROM questions WHERE session_id = $1 AND state = 'open') AS hold_until,
    extract(epoch FROM now()) AS read_at,
    (SELECT count(*) FROM messages WHERE session_id = $1 AND state = 'accepted') AS unread
FROM sessions se
LEFT JOIN LATERAL (SELECT step_no, kind, state, output FROM steps
    WHERE session_id = $1 AND state <> 'running' ORDER BY step_no DESC LIMIT 1) last ON true
LEFT JOIN LATERAL {ENTRY} entry ON true
WHERE se.session_id = $1
"""

_SOON_S: Final = 0.1  # nobody asks more often whether a wait has expired


class Standing(NamedTuple):
    """`tokens`: the length of the transcript; `config`: the session's."""

    progress: Progress
    tokens: int
    config: Mapping[str, Any]


async def progress(connection: asyncpg.Connection, session_id: str) -> Progress:
    """Read from the last step that ended, on the branch that the session is on."""
    return (await standing(connection, session_id)).progress


async def standing(source: asyncpg.Connection | Database, session_id: str) -> Standing:
    """Of one whose record is gone: it has ended."""
    row = await source.fetchrow(_SQL, session_id)
    if row is None:
        return Standing(Progress(hold=State.CANCELLED), 0, {})
    return Standing(_progress(row), row["tokens"] or 0, row["config"])


async def turn(db: Database, session_id: str) -> Mapping[str, Any]:
    """What the session's message says for its turn."""
    row = await db.fetchrow(f"SELECT options -> 'turn' AS turn FROM {ENTRY} entry", session_id)
    found: Mapping[str, Any] = (row["turn"] if row else None) or {}
    return found


def after(
    row: asyncpg.Record, step_no: int, output: Mapping[str, Any], tokens: int, config: Mapping[str, Any]
) -> Standing:
    """Where the record stands with the end of a step. `row`: the step's kind, and what was to be read before it, of a
    session that nothing holds up."""
    known = {**row, "waiting_for": None, "hold_until": None, "step_no": step_no, "state": "completed", "output": output}
    if row["kind"] == "input":
        known |= {"options": output.get("options"), "rounds": 0, "corrections": 0}
    elif row["kind"] == "tool" and "options" in output:
        known |= {"options": output["options"], "rounds": 0, "corrections": 0}
    elif row["kind"] == "tool":
        known["corrections" if output.get("outcome") == "corrected" else "rounds"] += 1
    return Standing(_progress(known), tokens, config)


def _progress(row: Mapping[str, Any]) -> Progress:
    kind, outcome = _ended_as(row)
    options: dict[str, Any] = row["options"] or {}
    hold = _hold(row)
    return Progress(
        step_no=row["step_no"] or 0,
        kind=kind,
        outcome=outcome,
        rounds=row["rounds"],
        tool_choice=options.get("tool_choice", "auto"),
        max_tool_rounds=options.get("max_tool_rounds", 0),
        hold=hold,
        hold_until=float(row["hold_until"] or 0.0) if hold else 0.0,
        hold_left_s=max(_SOON_S, float(row["hold_until"] - row["read_at"])) if hold and row["hold_until"] else 0.0,
        corrections=row["corrections"],
        unread=row["unread"],
        compacted=_compacted(row),
    )


def _ended_as(row: Mapping[str, Any]) -> tuple[str, str]:
    """Kind and outcome of the last step; of one that moves nothing on, those of the step that it came after."""
    if row["step_no"] is None:
        return "", ""
    output = row["output"] or {}
    if row["state"] != "completed":
        return "failed", ""
    if row["kind"] in ("decision", "compaction"):
        return output["after"]["kind"], output["after"]["outcome"]
    return row["kind"], output.get("outcome", "")


def _compacted(row: Mapping[str, Any]) -> bool:
    """Whether the last step was a compaction, done or in vain, or went back to one."""
    if row["kind"] == "decision":
        return bool(row["output"]["after"].get("compacted"))
    return row["kind"] == "compaction" and row["state"] in ("completed", "failed")


_STILL = frozenset({State.PAUSED, State.FAILED, State.CANCELLING, *TERMINAL})


def _hold(row: Mapping[str, Any]) -> str:
    if row["session_state"] == State.WAITING:
        return str(row["waiting_for"])
    return str(row["session_state"]) if row["session_state"] in _STILL else ""


_RUNNING = {"think": Move.THINK, "input": Move.THINK, "compaction": Move.THINK, "tool": Move.RUN_TOOL}
_NEXT = {Next.THINK: Move.THINK, Next.COMPACT: Move.THINK, Next.TOOLS: Move.RUN_TOOL, Next.REST: Move.REST}


async def way_back(connection: asyncpg.Connection, session_id: str) -> Move:
    """How a session that stood still goes on: the step that runs, else what the last one leads to."""
    running = await connection.fetchval(
        "SELECT kind FROM steps WHERE session_id = $1 AND state = 'running'", session_id
    )
    if running is not None:
        return _RUNNING[running]
    return _NEXT[next_action(await progress(connection, session_id))]
