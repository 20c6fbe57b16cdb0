"""A session that runs as a tool: whatever dies, its parent gets the answer that there was."""

from types import SimpleNamespace

import pytest

from runtime.config import SessionConfig
from runtime.steps.children import Child, run_child
from runtime.store import fleet, sessions, steps
from runtime.store.values import Segment
from runtime.tools.kinds import SessionTool
from tests.runtime.store.conftest import CONFIG, Story, checkpoint
from workflows.states import Event as Move

TENANT = fleet.DEFAULT_TENANT
TOOL = SessionTool(type="session", name="ask", description="Ask.")


@pytest.fixture
async def child(db) -> Child:
    parent = Story(db)
    await parent.placed()
    return Child("ses/1/0", await sessions.get(db, parent.session_id), 1, 0)


async def outcome(db, child) -> tuple[str, str]:
    """What the parent's node is told, as it looks (again) at the child."""
    node = SimpleNamespace(db=db, temporal=None)
    found = await run_child(node, child, SessionConfig(model="m", tools=[TOOL]), TOOL, "do it", 60, 1000)
    return found.reason, found.output.decode()


async def begun(db, child):
    """The child's first message is in its transcript."""
    story = Story(db)
    story.session_id = child.session_id
    await sessions.create(db, TENANT, child.session_id, CONFIG, 1, parent=(child.parent.session_id, 1, 0))
    await sessions.accept_message(db, TENANT, child.session_id, child.message_id, "do it", {"max_tool_rounds": 1})
    owner = await story.take_over()
    attempt = await story.begin(owner, 1, "input", message=child.message_id)
    output = {"outcome": "input", "message_id": child.message_id}
    segments = [Segment("message", [7])]
    await steps.complete(db, owner, attempt, segments=segments, output=output, checkpoint=checkpoint(1))
    return story, owner


async def answered(db, child):
    story, owner = await begun(db, child)
    attempt = await story.begin(owner, 2)
    output = {"outcome": "final", "calls": [], "text": "42"}
    await steps.complete(
        db, owner, attempt, segments=[Segment("model", [8])], output=output, checkpoint=checkpoint(3), to=Move.REST
    )
    return story


async def test_an_answer_ends_the_child(db, child):
    await answered(db, child)
    assert await outcome(db, child) == ("exit", "42")
    row = await db.fetchrow("SELECT ending FROM sessions WHERE session_id = $1", child.session_id)
    assert row["ending"] == "completed"


async def test_an_answer_outlives_the_node_that_ended_the_child_and_died_before_it_was_noted(db, child):
    await answered(db, child)
    assert await outcome(db, child) == ("exit", "42")
    assert await outcome(db, child) == ("exit", "42"), "while the child ends"
    await sessions.finish(db, child.session_id, "completed", {})
    assert await outcome(db, child) == ("exit", "42"), "once it has ended"


async def test_a_child_that_was_cancelled_by_hand_is_told_as_that_however_often_one_looks(db, child):
    await begun(db, child)
    await sessions.request_end(db, TENANT, child.session_id)
    for _ in range(2):
        reason, text = await outcome(db, child)
        assert (reason, text.rpartition(": ")[2]) == ("error", "it was cancelling")


async def test_a_child_that_was_interrupted_before_it_said_anything_is_not_waited_for(db, child):
    story, owner = await begun(db, child)
    attempt = await story.begin(owner, 2)
    await db.run(lambda c: sessions.end_running_step(c, child.session_id, "cancelled", "the turn was interrupted"))
    await db.run(lambda c: steps.rest(c, attempt.session, [], step_no=2))
    assert (await outcome(db, child))[0] == "error"


async def test_a_child_that_was_given_more_to_do_has_answered_all_the_same_and_ends_with_its_parent(db, child):
    story = await answered(db, child)
    await story.message("and another thing")
    assert await outcome(db, child) == ("exit", "42")
    assert (await sessions.get(db, child.session_id)).state == "idle"


async def interrupted(db, child, text: str, *, in_a_tool: bool = False):
    """The child's turn is ended by its user: in a think that has said `text`, or in the calls of that think."""
    story, owner = await begun(db, child)
    steps_of = [("think", "tools"), ("tool", "interrupted")] if in_a_tool else [("think", "interrupted")]
    for no, (kind, ended) in enumerate(steps_of, 2):
        attempt = await story.begin(owner, no, kind)
        output = {"outcome": ended, "calls": [], **({"text": text} if kind == "think" else {})}
        segments = [Segment("model", [8])]
        to = Move.REST if ended == "interrupted" else None
        await steps.complete(db, owner, attempt, segments=segments, output=output, checkpoint=checkpoint(no + 1), to=to)
    return story, owner


@pytest.mark.parametrize("in_a_tool", [False, True])
async def test_a_child_that_was_interrupted_has_not_answered_and_says_how_far_it_came(db, child, in_a_tool):
    await interrupted(db, child, "It is 4", in_a_tool=in_a_tool)
    for _ in range(2):
        reason, text = await outcome(db, child)
        assert reason == "error"
        assert "interrupted" in text
        assert text.endswith("It is 4")


async def test_a_child_that_answered_after_it_was_interrupted_has_answered(db, child):
    story, owner = await interrupted(db, child, "It is 4")
    await story.input(owner, 3, [7])
    attempt = await story.begin(owner, 4)
    output = {"outcome": "final", "calls": [], "text": "42"}
    await steps.complete(
        db, owner, attempt, segments=[Segment("model", [8])], output=output, checkpoint=checkpoint(5), to=Move.REST
    )
    assert await outcome(db, child) == ("exit", "42")
