"""End a session: its processes are dead, its pages free, and then the row says so."""

from __future__ import annotations

from runtime.errors import NotFound
from runtime.steps.boxes import release_box
from runtime.steps.children import end_children
from runtime.steps.collecting import collect_session
from runtime.steps.services import Services
from runtime.store import fleet, sessions
from workflows.contract import FinishIn


async def finish(s: Services, what: FinishIn) -> None:
    try:
        # Raising the epoch first makes every other writer of this session stop.
        session = await sessions.place(s.db, what.session_id, s.node_id, s.boot)
    except NotFound:
        return
    children = await end_children(s, what.session_id, session.tenant_id)
    had_sandbox = await release_box(s, what.session_id)
    client = await s.engine.client()
    dropped = await client.kv("drop", session=what.session_id, epoch=session.epoch, salt=session.salt, wait=True)
    # The record does not know yet what a first think of another session shares with this one; the engine does.
    deleted = await client.delete_keys(await fleet.private_pages(s.db, what.session_id), unheld=True)
    blobs = await collect_session(s, what.session_id)
    await fleet.note_residency(s.db, what.session_id, session.tenant_id, "none", {})
    freed = {
        "pages": dropped.pages + deleted.pages,
        "sandboxes": int(had_sandbox),
        "blobs": blobs,
        "children": children,
    }
    await sessions.finish(s.db, what.session_id, what.how, freed)
