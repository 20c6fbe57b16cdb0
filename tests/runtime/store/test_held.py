"""A statement that does everything at once writes nothing where somebody wrote between its beginning and its lock."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from runtime.errors import StaleEpoch
from runtime.store import sessions, steps, whole
from runtime.store.values import Event, Segment
from tests.runtime.store.conftest import checkpoint

WRITES = {
    "an event": "UPDATE sessions SET next_pos = next_pos + 1 WHERE session_id = $1",
    "an epoch": "UPDATE sessions SET epoch = epoch + 1 WHERE session_id = $1",
    "a state": "UPDATE sessions SET state = 'paused' WHERE session_id = $1",
}


async def waits_for_a_lock(connection: asyncpg.Connection) -> None:
    while not await connection.fetchval("SELECT true FROM pg_stat_activity WHERE wait_event_type = 'Lock' LIMIT 1"):
        await asyncio.sleep(0.01)


@pytest.fixture
async def other(db):
    connection = await asyncpg.connect(db.dsn)
    yield connection
    await connection.close()


async def begun_meanwhile(story, other, owner, write: str, *, commit: bool):
    """A step that begins while another transaction has the session's row."""
    transaction = other.transaction()
    await transaction.start()
    await other.execute(WRITES[write], story.session_id)
    beginning = asyncio.create_task(story.begin(owner, 2))
    await waits_for_a_lock(other)
    await (transaction.commit() if commit else transaction.rollback())
    return await beginning


async def test_a_step_begins_after_whatever_was_written_meanwhile(story, db, other):
    owner = await story.placed()
    await story.input(owner, 1, [1, 2, 3])
    attempt = await begun_meanwhile(story, other, owner, "an event", commit=True)
    assert (attempt.attempt_no, attempt.token_start, attempt.done) == (1, 3, None)
    positions = [row["pos"] for row in await db.fetch("SELECT pos FROM events ORDER BY pos")]
    assert len(positions) == len(set(positions))
    assert await db.fetchrow("SELECT 1 FROM steps WHERE step_no = 2 AND state = 'running'")


async def test_the_statement_that_does_everything_holds_nothing_that_was_written_to_meanwhile(story, db, other):
    owner = await story.placed()
    await story.input(owner, 1, [1])

    async def at_once():
        return await whole.begin(
            db,
            owner,
            2,
            "think",
            state="thinking",
            states=["thinking"],
            token="t",
            message_id=None,
            opening=None,
            started=Event("step.started"),
        )

    for commit in (True, False):
        transaction = other.transaction()
        await transaction.start()
        await other.execute(WRITES["an event"], story.session_id)
        beginning = asyncio.create_task(at_once())
        await waits_for_a_lock(other)
        await (transaction.commit() if commit else transaction.rollback())
        assert (await beginning is None) == commit


async def test_a_step_does_not_begin_where_the_session_was_taken_over_meanwhile(story, db, other):
    owner = await story.placed()
    await story.input(owner, 1, [1])
    with pytest.raises(StaleEpoch):
        await begun_meanwhile(story, other, owner, "an epoch", commit=True)
    assert not await db.fetch("SELECT 1 FROM steps WHERE step_no = 2")


async def test_a_step_does_not_begin_where_the_session_was_paused_meanwhile(story, db, other):
    owner = await story.placed()
    await story.input(owner, 1, [1])
    attempt = await begun_meanwhile(story, other, owner, "a state", commit=True)
    assert attempt.held
    assert not await db.fetch("SELECT 1 FROM steps WHERE step_no = 2")


async def test_what_was_taken_back_meanwhile_changes_nothing(story, db, other):
    owner = await story.placed()
    await story.input(owner, 1, [1])
    attempt = await begun_meanwhile(story, other, owner, "an epoch", commit=False)
    assert attempt.attempt_no == 1


@pytest.mark.parametrize("budget", [{}, {"tokens": 1000}])
async def test_a_step_ends_once_whoever_ends_it_again(story, db, budget):
    owner = await story.placed()
    await db.execute("UPDATE sessions SET budget = $2 WHERE session_id = $1", story.session_id, budget)
    await story.input(owner, 1, [1])
    attempt = await story.begin(owner, 2)
    about = {"output": {"outcome": "final", "text": ""}, "checkpoint": checkpoint(5)}
    first = await steps.complete(db, owner, attempt, segments=[Segment("model", [7])], **about)
    again = await steps.complete(db, owner, attempt, segments=[Segment("model", [7])], **about)
    assert (first.mine, again.mine) == (True, False)
    assert first.standing == again.standing
    assert first.standing.tokens == 5


async def test_an_epoch_that_is_over_writes_no_token(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [1])
    attempt = await story.begin(owner, 2)
    await story.take_over()
    with pytest.raises(StaleEpoch):
        await steps.append_tokens(db, owner, attempt, 0, [5], "x")
    with pytest.raises(StaleEpoch):
        await steps.complete(db, owner, attempt, segments=[], output={}, checkpoint=checkpoint(2))
    assert not await db.fetch("SELECT 1 FROM segments WHERE kind = 'model'")
    assert (await sessions.get(db, story.session_id)).spent["tokens"] == 0
