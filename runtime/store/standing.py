"""Where the record of a session stands: what the workflow decides by, read in one query."""

from __future__ import annotations

from typing import Any, Final

import asyncpg

from runtime.store.database import Database
from workflows.contract import Progress
from workflows.policies import Next, next_action
from workflows.states import TERMINAL, State
from workflows.states import Event as Move

_SQL = """
SELECT se.state AS session_state, se.waiting_for, se.config,
    (SELECT token_count FROM checkpoints
        WHERE session_id = se.session_id ORDER BY step_no DESC LIMIT 1) AS tokens,
    last.step_no, last.kind, last.state, last.output,
    entry.options, entry.step_no AS entry_no,
    (SELECT count(*) FROM steps WHERE session_id = se.session_id AND live AND state = 'completed'
        AND kind = 'tool' AND step_no > coalesce(entry.step_no, 0) AND output ->> 'outcome' <> 'corrected') AS rounds,
    (SELECT count(*) FROM steps WHERE session_id = se.session_id AND live AND state = 'completed'
        AND kind = 'tool' AND step_no > coalesce(entry.step_no, 0) AND output ->> 'outcome' = 'corrected')
        AS corrections,
    (SELECT extract(epoch FROM min(expires_at)) FROM questions
        WHERE session_id = se.session_id AND state = 'open') AS hold_until, extract(epoch FROM now()) AS read_at,
    (SELECT count(*) FROM messages WHERE session_id = se.session_id AND state = 'accepted') AS unread
FROM sessions se
LEFT JOIN LATERAL (SELECT step_no, kind, state, output FROM steps
    WHERE session_id = se.session_id AND state <> 'running' ORDER BY step_no DESC LIMIT 1) last ON true
LEFT JOIN LATERAL (SELECT s.step_no, coalesce(s.output -> 'options', m.options) AS options
    FROM steps s LEFT JOIN messages m USING (message_id) WHERE s.session_id = se.session_id AND s.live
    AND s.kind = 'input' AND s.state = 'completed' ORDER BY s.step_no DESC LIMIT 1) entry ON true
WHERE se.session_id = $1
"""

_SOON_S: Final = 0.1  # nobody asks more often whether a wait has expired


async def progress(connection: asyncpg.Connection, session_id: str) -> Progress:
    """Read from the last step that ended, on the branch that the session is on."""
    return (await standing(connection, session_id))[0]


async def standing(source: asyncpg.Connection | Database, session_id: str) -> tuple[Progress, int, dict[str, Any]]:
    """The progress, the length of the transcript in tokens, and the session's configuration. One whose record is gone
    has ended."""
    row = await source.fetchrow(_SQL, session_id)
    if row is None:
        return Progress(hold=State.CANCELLED), 0, {}
    return _progress(row), row["tokens"] or 0, row["config"]


def _progress(row: asyncpg.Record) -> Progress:
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


def _ended_as(row: asyncpg.Record) -> tuple[str, str]:
    """Kind and outcome of the last step; of one that moves nothing on, those of the step that it came after."""
    if row["step_no"] is None:
        return "", ""
    output = row["output"] or {}
    if row["state"] != "completed":
        return "failed", ""
    if row["kind"] in ("decision", "compaction"):
        return output["after"]["kind"], output["after"]["outcome"]
    return row["kind"], output.get("outcome", "")


def _compacted(row: asyncpg.Record) -> bool:
    """Whether the last step was a compaction, done or in vain, or went back to one."""
    if row["kind"] == "decision":
        return bool(row["output"]["after"].get("compacted"))
    return row["kind"] == "compaction" and row["state"] in ("completed", "failed")


_STILL = frozenset({State.PAUSED, State.FAILED, State.CANCELLING, *TERMINAL})


def _hold(row: asyncpg.Record) -> str:
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
