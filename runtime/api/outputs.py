"""What a tool printed, as bytes: events and the model get a part of it as text."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from fastapi.responses import Response

from runtime.api import views
from runtime.api.documented import Id, refusals
from runtime.api.guard import Db, Tenant
from runtime.errors import NotFound

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], responses=refusals(404))
_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}
Number = Annotated[int, Path(ge=0, lt=2**31)]
# The session, and those that it has the step from.
_OUTPUT = """
WITH RECURSIVE line AS (
    SELECT session_id, parent_id, parent_step, parent_call FROM sessions WHERE session_id = $1
    UNION ALL
    SELECT p.session_id, p.parent_id, p.parent_step, p.parent_call FROM sessions p
    JOIN line ON p.session_id = line.parent_id AND line.parent_call IS NULL AND line.parent_step >= $2
)
SELECT output FROM tool_calls JOIN line USING (session_id) WHERE step_no = $2 AND call_no = $3 AND status = 'settled'
"""


@router.get("/{session_id}/steps/{step}/calls/{call}/output", response_class=Response, responses=_BYTES)
async def output(session_id: Id, step: Number, call: Number, db: Db, tenant: Tenant) -> Response:
    """All that was kept of a settled call's output: capped at its source, where a marker says what was left out. Of a
    step that a fork has from another session: as long as that session's record is kept."""
    await views.owned(db, tenant, session_id)
    row = await db.fetchrow(_OUTPUT, session_id, step, call)
    if row is None:
        raise NotFound(f"step {step} of the session has no settled call {call}")
    headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment"}
    return Response(row["output"] or b"", media_type="application/octet-stream", headers=headers)
