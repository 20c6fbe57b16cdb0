"""A call that is a session of its own: made once under a name that follows from the call, waited for, and ended."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from runtime import delivery
from runtime.config import SessionConfig
from runtime.errors import Conflict, Forbidden, NotFound, TooManyRequests
from runtime.steps.services import Services
from runtime.store import domains, sessions
from runtime.store.values import Session
from runtime.tools.kinds import SessionTool
from runtime.tools.outcome import Outcome
from runtime.unwanted import is_unwanted
from workflows.states import TERMINAL, State

LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Child:
    """`key`: of the call, from which the ids of session and message follow, so that a repeat finds what there is."""

    key: str
    parent: Session
    step_no: int
    call_no: int

    @property
    def session_id(self) -> str:
        return f"ses_{self._digest('session')}"

    @property
    def message_id(self) -> str:
        return f"msg_{self._digest('message')}"

    @property
    def seed(self) -> int:
        return int(self._digest(f"seed {self.parent.seed}")[:15], 16)

    def _digest(self, what: str) -> str:
        return hashlib.sha256(f"{what} {self.key}".encode()).hexdigest()[:24]


async def run_child(
    s: Services, child: Child, config: SessionConfig, tool: SessionTool, task: str, timeout_s: float, limit_bytes: int
) -> Outcome:
    """The child's answer to its task. A child that waits for a person is waited for; its time runs on."""
    try:
        async with asyncio.timeout(timeout_s):
            await _begin(s, child, config, tool, task)
            outcome = await _answer(s, child, limit_bytes)
    except (Forbidden, TooManyRequests) as refused:  # a quota of the tenant
        await end_child(s, child, "cancelled")
        return Outcome.refused(str(refused))
    except TimeoutError:
        await end_child(s, child, "cancelled")
        return Outcome("timeout", None, b"the session that was to do it took too long")
    except asyncio.CancelledError:
        if is_unwanted():
            await asyncio.shield(end_child(s, child, "cancelled"))
        raise
    await end_child(s, child, "cancelled" if outcome.reason == "error" else "completed")
    return outcome


async def _begin(s: Services, child: Child, config: SessionConfig, tool: SessionTool, task: str) -> None:
    parent = child.parent
    row = await s.db.fetchrow("SELECT kv_domain FROM sessions WHERE session_id = $1", parent.session_id)
    of_parent = row["kv_domain"] if row else None
    domain = of_parent and domains.domain_of(parent.tenant_id, child.session_id, config.kv.share, True)
    made = config.of_child(tool).model_copy(update={"model": config.model})
    await sessions.create(
        s.db,
        parent.tenant_id,
        child.session_id,
        made.model_dump(),
        child.seed,
        domain=domain,
        parent=(parent.session_id, child.step_no, child.call_no),
    )
    options = {"tool_choice": tool.tool_choice, "max_tool_rounds": tool.max_tool_rounds}
    await sessions.accept_message(s.db, parent.tenant_id, child.session_id, child.message_id, task, options)
    if s.temporal is not None and not await sessions.has_ended(s.db, child.session_id):
        await delivery.quietly(delivery.deliver(s.temporal, child.session_id, child.message_id))


async def _answer(s: Services, child: Child, limit_bytes: int) -> Outcome:
    while True:
        row = await s.db.fetchrow(
            "SELECT s.state, s.error, m.state AS message, said.output, ended.outcome AS ended_as"
            " FROM sessions s JOIN messages m USING (session_id)"
            " LEFT JOIN LATERAL (SELECT output FROM steps WHERE session_id = s.session_id AND kind = 'think'"
            " AND state = 'completed' AND live ORDER BY step_no DESC LIMIT 1) said ON true"
            " LEFT JOIN LATERAL (SELECT coalesce(output -> 'after', output) ->> 'outcome' AS outcome FROM steps"
            " WHERE session_id = s.session_id AND state = 'completed' AND live ORDER BY step_no DESC LIMIT 1) ended"
            " ON true WHERE m.message_id = $1",
            child.message_id,
        )
        if row is None:
            raise NotFound(f"session {child.session_id}, which runs as a tool, is gone")
        state = State(row["state"])
        # One that is `completed` answered before: whoever ended it then died before it could note the answer.
        rests = state in (State.IDLE, State.COMPLETED) and row["message"] == "consumed"
        text = str((row["output"] or {}).get("text") or "").encode()
        if row["ended_as"] == "interrupted" and (rests or state in (State.CANCELLING, State.CANCELLED)):
            return _interrupted(child, text, limit_bytes)
        if rests and row["output"] is not None:
            return Outcome("exit", 0, text[:limit_bytes], len(text) > limit_bytes, {"session": child.session_id})
        if rests or state is State.FAILED or state in TERMINAL or state is State.CANCELLING:
            why = (row["error"] or {}).get("message", f"it was {'interrupted' if rests else state}")
            return Outcome("error", None, f"the session that was to do it ended without an answer: {why}".encode())
        await asyncio.sleep(LOOK_EVERY_S)


def _interrupted(child: Child, said: bytes, limit_bytes: int) -> Outcome:
    so_far = b"; so far it had said:\n" + said[:limit_bytes] if said else b""
    why = b"the session that was to do it was interrupted before it had answered" + so_far
    return Outcome("error", None, why, len(said) > limit_bytes, {"session": child.session_id})


async def end_child(s: Services, child: Child, how: str) -> None:
    """Idempotent; one that was never made stays so, and one that was given more to do than its task ends with its
    parent. The reconciler sees to it where Temporal is away."""
    try:
        state = await sessions.request_end(s.db, child.parent.tenant_id, child.session_id, how)
    except (NotFound, Conflict):
        return
    if s.temporal is not None and state not in TERMINAL:
        await delivery.quietly(delivery.end(s.temporal, child.session_id, how))


async def end_children(s: Services, session_id: str, tenant_id: str) -> int:
    """Cancel what still runs as a tool of a session that ends. Returns how many there were."""
    rows = await s.db.fetch(
        "SELECT session_id FROM sessions WHERE parent_id = $1 AND parent_call IS NOT NULL"
        " AND state NOT IN ('cancelling', 'cancelled', 'completed')",
        session_id,
    )
    for row in rows:
        await sessions.request_end(s.db, tenant_id, row["session_id"], "cancelled")
        if s.temporal is not None:
            await delivery.quietly(delivery.end(s.temporal, row["session_id"], "cancelled"))
    return len(rows)
