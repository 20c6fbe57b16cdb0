"""An interrupt that finds a message half taken, since the node that took it died between the step's begin and end."""

import contextlib
from types import SimpleNamespace

import pytest

from runtime.steps import inputs, interrupting
from runtime.steps.recent import Recent
from runtime.store import Owner, commands, fleet, sessions, standing
from sandbox import BlobStore
from tests.runtime.store.conftest import Story
from workflows.contract import InputIn, StepIn

TENANT = fleet.DEFAULT_TENANT


@pytest.fixture
def story(db) -> Story:
    return Story(db)


@pytest.fixture
def node(db, tmp_path):
    """A node, as far as taking a message goes."""
    return SimpleNamespace(
        db=db,
        chat=SimpleNamespace(user=lambda text: [7] * len(text), opening=lambda system, tools: [1]),
        engine=SimpleNamespace(card=SimpleNamespace(context_length=1000, fingerprint="f", external=False)),
        blobs=BlobStore(tmp_path),
        blob_lock=contextlib.nullcontext(),
        volumes=(),
        recent=Recent(),
        owner=lambda session_id, epoch: Owner(session_id, epoch, "n", "boot"),
    )


async def half_taken(story: Story, on_busy: str = "enqueue", message: str = "m1") -> Owner:
    """The session with a message in the middle of its input step, placed anew."""
    owner = await story.placed()
    await said(story, message, on_busy)
    await story.begin(owner, 1, "input", message=message)
    return await story.take_over()


async def said(story: Story, message: str, on_busy: str = "enqueue") -> None:
    about = {"tool_choice": "auto", "max_tool_rounds": 0}
    await sessions.accept_message(story.db, TENANT, story.session_id, message, "hello", about, on_busy=on_busy)


async def interrupt(node, owner: Owner) -> None:
    await interrupting.interrupt(node, StepIn(owner.session_id, owner.epoch, 1), "run/1/1")


async def stands(story: Story) -> tuple[str, str, int, bool]:
    """The session's state, how its last step ended, how many messages wait, and whether a step runs."""
    at, _, _ = await standing.standing(story.db, story.session_id)
    running = await story.db.fetch("SELECT 1 FROM steps WHERE session_id = $1 AND state = 'running'", story.session_id)
    return (await sessions.get(story.db, story.session_id)).state, at.outcome, at.unread, bool(running)


async def command(story: Story, verb: str) -> None:
    await commands.accept(story.db, TENANT, story.session_id, f"cmd_{verb}", verb, {})


async def test_an_interrupt_ends_the_turn_of_a_message_that_was_half_taken_once_it_is_taken(story, node):
    owner = await half_taken(story)
    await command(story, "interrupt")
    for _ in range(2):
        await interrupt(node, owner)
        assert await stands(story) == ("idle", "interrupted", 0, False)
    assert not (await commands.apply(story.db, story.session_id)).interrupt
    assert (await story.events()).count("session.interrupted") == 1


async def test_a_session_that_was_paused_with_a_message_half_taken_stays_so_at_rest(story, node):
    owner = await half_taken(story)
    await command(story, "pause")
    await commands.apply(story.db, story.session_id)
    await interrupt(node, owner)
    assert await stands(story) == ("paused", "interrupted", 0, False)


async def test_a_message_that_interrupts_ends_the_turn_of_the_one_that_was_half_taken(story, node):
    owner = await half_taken(story, on_busy="interrupt")
    await said(story, "m2", "interrupt")
    await interrupt(node, owner)
    assert await stands(story) == ("idle", "interrupted", 1, False)


async def test_a_message_that_interrupts_does_not_end_its_own_turn(story, node):
    owner = await half_taken(story, on_busy="interrupt")
    await said(story, "m2")
    await interrupt(node, owner)
    assert await stands(story) == ("thinking", "", 2, True)
    assert (await inputs.take(node, InputIn(story.session_id, owner.epoch, 1, "m1"), "run/2/1")).fits
    assert await stands(story) == ("thinking", "input", 1, False)


async def test_a_command_ends_the_turn_of_a_message_that_interrupts_too(story, node):
    owner = await half_taken(story, on_busy="interrupt")
    await command(story, "interrupt")
    await interrupt(node, owner)
    assert await stands(story) == ("idle", "interrupted", 0, False)
