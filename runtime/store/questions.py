"""What a session waits for: approval of a call, the outcome of one that nobody saw end, the result of a tool that runs
at the caller, or a larger budget. A question is asked by the step that needs its answer, and stays until it is
answered, expires, or its step is left behind (void)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from runtime.errors import Conflict, InvalidRequest, NotFound
from runtime.store import events
from runtime.store.database import Database
from runtime.store.sessions import new_id, set_state
from runtime.store.values import Event, Session
from workflows.states import TERMINAL, State
from workflows.states import Event as Move

DECISIONS: Mapping[str, frozenset[str]] = {
    "approval": frozenset({"approve", "decline"}),
    "outcome": frozenset({"ran", "did_not_run", "decline"}),
    "client_tool": frozenset({"result"}),
    "budget": frozenset({"raise", "stop"}),
}
_ASKED = {
    "approval": "tool.approval_required",
    "outcome": "tool.outcome_unknown",
    "client_tool": "tool.client_required",
    "budget": "budget.exhausted",
}


@dataclass(frozen=True)
class Asked:
    """What a step wants to know. `call_no`: of the call that it is about, -1 for none."""

    kind: str
    call_no: int
    about: Mapping[str, Any]
    expires_s: float | None = None


@dataclass(frozen=True)
class Answer:
    """`state`: open, answered or expired. `answer` has `decision` and what came with it."""

    question_id: str
    state: str
    answer: Mapping[str, Any]

    @property
    def decision(self) -> str:
        return str(self.answer.get("decision", ""))


async def ask(connection: asyncpg.Connection, session: Session, step_no: int, asked: Asked) -> Answer:
    """Ask once: a question that stands is not asked again, its answer is given. The session's row is locked."""
    made = await connection.fetchval(
        "INSERT INTO questions (question_id, tenant_id, session_id, step_no, call_no, kind, about, expires_at)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, now() + make_interval(secs => $8)) ON CONFLICT DO NOTHING RETURNING true",
        new_id("qst"),
        session.tenant_id,
        session.session_id,
        step_no,
        asked.call_no,
        asked.kind,
        dict(asked.about),
        asked.expires_s,
    )
    row = await connection.fetchrow(
        "SELECT question_id, state, answer, expires_at FROM questions WHERE session_id = $1 AND step_no = $2"
        " AND call_no = $3 AND kind = $4 AND state <> 'void'",
        session.session_id,
        step_no,
        asked.call_no,
        asked.kind,
    )
    if made:
        expires = row["expires_at"].isoformat() if row["expires_at"] else None
        about = {"question_id": row["question_id"], **asked.about, "expires_at": expires}
        if asked.call_no >= 0:
            about["call"] = asked.call_no
        await events.append(connection, session.session_id, [Event(_ASKED[asked.kind], about)], step_no=step_no)
    return Answer(row["question_id"], row["state"], row["answer"] or {})


async def hold(connection: asyncpg.Connection, session: Session, kind: str) -> None:
    """The session waits from now on."""
    state = State(
        await connection.fetchval("SELECT state FROM sessions WHERE session_id = $1 FOR UPDATE", session.session_id)
    )
    if state not in (State.WAITING, State.PAUSED, State.CANCELLING):
        await set_state(connection, session.session_id, state, Move.WAIT, waiting_for=kind)
        waiting = Event("session.waiting", {"waiting_for": kind})
        await events.append(connection, session.session_id, [waiting])


def _ensure_raised(about: Mapping[str, Any], limits: Mapping[str, float | None]) -> None:
    """Raises InvalidRequest where the session would stand at the same wall again."""
    measure, spent = about["measure"], about["spent"]
    if measure not in limits or ((limit := limits[measure]) is not None and limit <= spent):
        raise InvalidRequest(
            f"budget: {measure} is what is used up ({spent:g}): give {measure} a limit beyond that, or null for none",
            param="budget",
        )


async def answer(db: Database, tenant_id: str, question_id: str, given: Mapping[str, Any]) -> str | None:
    """Accept an answer: from here on it is never lost. Returns the command that tells the session, None for a repeat.

    Raises NotFound; InvalidRequest where the decision does not fit the question; Conflict where it was answered
    otherwise, expired, or its step was left behind.
    """
    (command,) = await answer_all(db, tenant_id, {question_id: given})
    return command


async def answer_all(db: Database, tenant_id: str, given: Mapping[str, Mapping[str, Any]]) -> list[str | None]:
    """Accept answers by question, all or none: a session never goes on with some of them."""

    async def work(connection: asyncpg.Connection) -> list[str | None]:
        return [await _answer(connection, tenant_id, question_id, one) for question_id, one in given.items()]

    return await db.run(work)


async def _answer(
    connection: asyncpg.Connection, tenant_id: str, question_id: str, given: Mapping[str, Any]
) -> str | None:
    row = await connection.fetchrow(
        "SELECT q.*, s.state AS session_state FROM questions q JOIN sessions s USING (session_id)"
        " WHERE q.question_id = $1 AND q.tenant_id = $2 FOR UPDATE OF s",
        question_id,
        tenant_id,
    )
    if row is None:
        raise NotFound(f"there is no question {question_id}")
    # The row again, now that its session is locked.
    row = {**row, **await connection.fetchrow("SELECT * FROM questions WHERE question_id = $1", question_id)}
    if given["decision"] not in DECISIONS[row["kind"]]:
        raise InvalidRequest(
            f"decision: {given['decision']!r} is no answer to a question about {row['kind'].replace('_', ' ')};"
            f" use {' or '.join(sorted(DECISIONS[row['kind']]))}",
            param="decision",
        )
    if row["state"] == "answered" and row["answer"] == dict(given):
        return None
    if given["decision"] == "raise":
        _ensure_raised(row["about"], given["budget"])
    if row["state"] != "open" or row["session_state"] in (*TERMINAL, State.CANCELLING):
        raise Conflict(_too_late(row))
    await connection.execute(
        "UPDATE questions SET state = 'answered', answer = $2, answered_at = now() WHERE question_id = $1",
        question_id,
        dict(given),
    )
    command_id = f"cmd_{question_id}"
    await connection.execute(
        "INSERT INTO commands (command_id, tenant_id, session_id, verb, argument) VALUES ($1, $2, $3, 'answer', $4)",
        command_id,
        tenant_id,
        row["session_id"],
        {"question_id": question_id},
    )
    about = {"question_id": question_id, "kind": row["kind"], "decision": given["decision"]}
    if given.get("reason"):
        about["reason"] = given["reason"]
    told = Event("question.answered", about)
    await events.append(connection, row["session_id"], [told], step_no=row["step_no"])
    return command_id


def _too_late(row: Mapping[str, Any]) -> str:
    about = f"question {row['question_id']} about step {row['step_no']}"
    if row["state"] == "answered":
        return f"{about} was answered before, with {row['answer']['decision']!r}; the first answer holds"
    if row["state"] == "expired":
        return f"{about} expired before it was answered"
    if row["state"] == "void":
        return f"{about} is void: its step was interrupted, rewound or ended"
    return f"{about} cannot be answered: session {row['session_id']} is {row['session_state']}"


async def expire(connection: asyncpg.Connection, session_id: str) -> None:
    """Questions that nobody answered in time. The session's row is locked."""
    rows = await connection.fetch(
        "UPDATE questions SET state = 'expired', answered_at = now(), answer = '{\"decision\": \"expired\"}'"
        " WHERE session_id = $1 AND state = 'open' AND expires_at <= now() RETURNING question_id, step_no, kind",
        session_id,
    )
    for row in rows:
        expired = Event("question.expired", {"question_id": row["question_id"], "kind": row["kind"]})
        await events.append(connection, session_id, [expired], step_no=row["step_no"])


async def open_kinds(connection: asyncpg.Connection, session_id: str) -> Sequence[str]:
    rows = await connection.fetch(
        "SELECT kind FROM questions WHERE session_id = $1 AND state = 'open' ORDER BY created_at", session_id
    )
    return [row["kind"] for row in rows]
