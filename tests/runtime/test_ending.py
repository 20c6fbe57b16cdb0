"""What comes too late for a session that has ended changes nothing of it."""

from types import SimpleNamespace

import pytest

from runtime import delivery
from runtime.config import SessionConfig
from runtime.steps.activities import Steps
from runtime.steps.children import Child, run_child
from runtime.store import fleet, sessions, standing
from runtime.tools.kinds import SessionTool
from tests.runtime.store.conftest import CONFIG, Story
from workflows.contract import FinishIn, PlaceIn
from workflows.policies import ends_as

TOOL = SessionTool(type="session", name="ask", description="Ask.")


@pytest.fixture
async def story(db) -> Story:
    """A session that has ended."""
    story = Story(db)
    await story.placed()
    await sessions.request_end(db, fleet.DEFAULT_TENANT, story.session_id)
    at, _, _ = await standing.standing(db, story.session_id)
    assert ends_as(at) == "cancelled"
    await sessions.finish(db, story.session_id, "cancelled", {})
    return story


@pytest.fixture
def node(db) -> Steps:
    return Steps(
        SimpleNamespace(db=db, engine=SimpleNamespace(card=SimpleNamespace(context_length=100, external=False)))
    )


async def test_a_session_that_has_ended_is_neither_placed_nor_ended_again(story, node):
    events = await story.events()
    placed = await node.place(PlaceIn(story.session_id))
    assert (ends_as(placed.progress), placed.queue) == ("cancelled", "")
    await node.finish(FinishIn(story.session_id, "completed"))
    assert await story.events() == events
    assert (await sessions.get(story.db, story.session_id)).epoch == 1


async def test_a_session_whose_record_is_gone_has_ended(db, node):
    placed = await node.place(PlaceIn("ses_gone"))
    assert ends_as(placed.progress) == "cancelled"
    await node.finish(FinishIn("ses_gone", "cancelled"))


async def test_nothing_is_said_to_a_child_that_has_ended(db, story, monkeypatch):
    said = []
    for name in ("deliver", "end"):
        monkeypatch.setattr(delivery, name, lambda *args, **_: said.append(args))
    child = Child("ses/1/0", await sessions.get(db, story.session_id), 1, 0)
    await sessions.create(db, fleet.DEFAULT_TENANT, child.session_id, CONFIG, 1, parent=(story.session_id, 1, 0))
    about = {"tool_choice": "auto", "max_tool_rounds": 0}
    await sessions.accept_message(db, fleet.DEFAULT_TENANT, child.session_id, child.message_id, "do it", about)
    await sessions.request_end(db, fleet.DEFAULT_TENANT, child.session_id)
    await sessions.finish(db, child.session_id, "cancelled", {})
    node = SimpleNamespace(db=db, temporal=object())
    done = await run_child(node, child, SessionConfig(model="m", tools=[TOOL]), TOOL, "do it", 60, 1000)
    assert (done.reason, said) == ("error", [])
