"""Stop a turn: what runs ends with what it has so far, and no call is left without a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime.config import SessionConfig
from runtime.steps import inputs, thinking, tooling
from runtime.steps.services import Services
from runtime.store import branches, sessions, standing, steps
from runtime.store.held import locked
from runtime.store.sessions import end_running_step
from runtime.store.values import Event, Owner
from workflows.contract import InputIn, Progress, StepIn
from workflows.policies import Next, next_action
from workflows.states import State


async def interrupt(s: Services, what: StepIn, execution: str) -> None:
    """Idempotent; a session at rest, paused at rest or failed stays as it is."""
    session = await sessions.get(s.db, what.session_id)
    if State(session.state) in (State.FAILED, State.CREATED):
        return
    owner = s.owner(what.session_id, what.epoch)
    at = await s.db.run(lambda c: standing.progress(c, what.session_id))
    # A step that completed while word of it was lost is known here; the workflow may still think it runs.
    what = replace(what, step_no=at.step_no + 1)
    config = SessionConfig.model_validate(session.config)
    running = await s.db.fetchrow("SELECT kind FROM steps WHERE session_id = $1 AND state = 'running'", what.session_id)
    kind = running["kind"] if running else None
    if kind == "input":
        if not await _take_first(s, what, execution):
            return
        at, kind = await s.db.run(lambda c: standing.progress(c, what.session_id)), None
    if kind == "tool" or (kind is None and next_action(at) is Next.TOOLS):
        await tooling.interrupt_tools(s, owner, config, what, execution)
    elif kind == "think" and await thinking.interrupt_think(s, owner, what, execution):
        pass
    elif kind in ("think", "compaction") or (kind is None and next_action(at) is not Next.REST):
        await _decide(s, owner, at)


_MEANT_FOR_IT = (
    # A message that interrupts does not end its own turn; what was asked after it was begun does.
    "SELECT m.options ->> 'on_busy' IS DISTINCT FROM 'interrupt'"
    " OR EXISTS (SELECT FROM messages later WHERE later.session_id = m.session_id AND later.state = 'accepted'"
    "   AND later.seq > m.seq AND later.options ->> 'on_busy' = 'interrupt')"
    " OR EXISTS (SELECT FROM commands c WHERE c.session_id = m.session_id AND c.verb = 'interrupt'"
    "   AND c.created_at >= s.started_at)"
    " FROM steps s JOIN messages m USING (message_id) WHERE s.session_id = $1 AND s.state = 'running'"
)


async def _take_first(s: Services, what: StepIn, execution: str) -> bool:
    """A message that a lost node has half taken is taken, so that its turn can end. False: it is left as it is, and
    taken next."""
    if not (row := await s.db.fetchrow(_MEANT_FOR_IT, what.session_id)) or not row[0]:
        return False
    asked = InputIn(what.session_id, what.epoch, what.step_no, "")
    return (await inputs.take(s, asked, execution, stopping=True)).fits


async def _decide(s: Services, owner: Owner, at: Progress) -> None:
    """Nothing came of what ran, or nothing ran yet: a step that says that the turn ends here."""

    async def work(connection: Any) -> None:
        session = await locked(connection, owner.session_id, owner.epoch)
        await end_running_step(connection, owner.session_id, "cancelled", "the turn was interrupted")
        like = await connection.fetchrow(
            "SELECT c.* FROM checkpoints c JOIN steps s USING (session_id, step_no)"
            " WHERE session_id = $1 AND s.live ORDER BY step_no DESC LIMIT 1",
            owner.session_id,
        )
        output = {"decision": "interrupt", "after": {"kind": "decision", "outcome": "interrupted"}}
        step_no = await branches.add_decision(
            connection, owner.session_id, parent_no=like["step_no"], output=output, like=like
        )
        await steps.rest(connection, session, [Event("session.interrupted")], step_no=step_no)

    if at.step_no:
        await s.db.run(work)
