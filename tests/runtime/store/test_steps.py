import asyncio

import asyncpg
import pytest

from runtime.errors import StaleEpoch
from runtime.store import events, sessions, standing, steps
from runtime.store.values import Event, Sampled, Segment
from tests.runtime.store.conftest import checkpoint
from workflows.contract import Progress
from workflows.states import Event as Move
from workflows.states import IllegalTransition


async def test_a_completed_step_is_told_and_never_begun_again(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7, 8])
    attempt = await story.begin(owner, 2)
    await steps.append_tokens(db, owner, attempt, 0, [9], "x")
    done = {"outcome": "final", "text": "x"}
    await steps.complete(
        db, owner, attempt, segments=[Segment("scaffold", [2])], output=done, checkpoint=checkpoint(5), to=Move.REST
    )
    before = await story.events()
    again = await story.begin(owner, 2)
    assert again.done == done
    assert await story.events() == before
    assert await steps.transcript(db, owner.session_id, 99) == [7, 8, 1, 9, 2]


async def test_tokens_written_twice_are_kept_once(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2)
    for _ in range(3):
        await steps.append_tokens(db, owner, attempt, 0, [10, 11], "ab")
    await steps.append_tokens(db, owner, attempt, 2, [12], "c")
    assert (await story.begin(owner, 2)).model_tokens == [10, 11, 12]
    assert (await story.events()).count("model.delta") == 2


async def test_a_gap_in_the_tokens_is_refused(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2)
    with pytest.raises(StaleEpoch, match="has 0 durable tokens, not 5"):
        await steps.append_tokens(db, owner, attempt, 5, [10], "a")


async def test_an_owner_of_an_older_epoch_can_write_nothing(story, db):
    zombie = await story.placed()
    await story.input(zombie, 1, [7])
    attempt = await story.begin(zombie, 2)
    owner = await story.take_over()
    assert owner.epoch == zombie.epoch + 1
    told = await story.events()
    with pytest.raises(StaleEpoch):
        await steps.append_tokens(db, zombie, attempt, 0, [10], "a")
    with pytest.raises(StaleEpoch):
        await steps.complete(db, zombie, attempt, segments=[], output={}, checkpoint=checkpoint(2))
    with pytest.raises(StaleEpoch):
        await events.write(db, zombie.session_id, [Event("kv.pinned")], epoch=zombie.epoch, step_no=2)
    with pytest.raises(StaleEpoch):
        await story.begin(zombie, 2)
    assert await story.events() == told


async def test_a_resumed_step_keeps_its_durable_tokens_and_says_how_many(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2)
    await steps.append_tokens(db, owner, attempt, 0, [10, 11], "ab")
    owner = await story.take_over()
    resumed = await story.begin(owner, 2)
    assert (resumed.attempt_no, resumed.model_tokens) == (2, [10, 11])
    retrying = (await events.read(db, owner.session_id, 0, 100))[-1]
    assert (retrying["type"], retrying["data"]["keep"]) == ("step.retrying", 2)
    rows = await db.fetch("SELECT outcome FROM attempts WHERE step_no = 2 ORDER BY attempt_no")
    assert [row["outcome"] for row in rows] == ["lost", "running"]


async def test_a_step_that_cannot_go_on_from_its_tokens_begins_anew_and_says_so(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2)
    await steps.append_tokens(db, owner, attempt, 0, [10, 11], "ab", spent=1)
    owner = await story.take_over()
    anew = await story.begin(owner, 2, token="again", keeps=lambda sampled: sampled != [10, 11])
    assert (anew.attempt_no, anew.model_tokens) == (2, [])
    retrying = (await events.read(db, owner.session_id, 0, 100))[-1]
    assert (retrying["data"]["keep"], retrying["data"]["dropped"]) == (0, 2)
    await steps.append_tokens(db, owner, anew, 0, [12], "c", spent=1)
    repeated = await story.begin(owner, 2, token="again", keeps=lambda _: False)
    assert repeated.model_tokens == [12], "what an attempt wrote itself is its own"
    output = {"outcome": "final", "sampled": 5, "exact": False}
    await steps.complete(db, owner, anew, segments=[], output=output, checkpoint=checkpoint(3), spent=4)
    assert await steps.transcript(db, owner.session_id, 99) == [7, 1, 12]
    counted = "SELECT (SELECT spent_tokens FROM sessions), (SELECT sum(sampled) FROM usage WHERE kind = 'think')"
    assert tuple(await db.fetchrow(counted)) == (6, 5)


async def test_a_step_keeps_the_tokens_that_it_can_go_on_from(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    await steps.append_tokens(db, owner, await story.begin(owner, 2), 0, [10, 11], "ab")
    kept = await story.begin(await story.take_over(), 2, keeps=lambda _: True)
    assert kept.model_tokens == [10, 11]


async def test_a_begin_repeated_after_a_lost_answer_opens_no_second_attempt(story):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    first = await story.begin(owner, 2, token="same")
    assert (await story.begin(owner, 2, token="same")).attempt_no == first.attempt_no == 1


async def test_positions_are_one_sequence_whoever_writes(story, db):
    owner = await story.placed()
    note = [Event("sandbox.note"), Event("sandbox.note")]
    await asyncio.gather(
        *(events.write(db, owner.session_id, note, epoch=owner.epoch, step_no=1) for _ in range(10)),
        *(story.message() for _ in range(10)),
    )
    found = await events.read(db, owner.session_id, 0, 1000)
    assert [event["id"] for event in found] == list(range(1, len(found) + 1))


async def test_checkpoints_and_events_and_the_transcript_cannot_be_altered(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    for table in ("checkpoints", "events", "segments"):
        with pytest.raises(asyncpg.CheckViolationError, match="immutable"):
            await db.execute(f"UPDATE {table} SET tenant_id = tenant_id")


async def test_progress_says_what_a_fresh_workflow_must_do(story, db):
    owner = await story.placed()

    async def progress() -> Progress:
        return await db.run(lambda c: standing.progress(c, owner.session_id))

    assert await progress() == Progress()
    await story.input(owner, 1, [7])
    assert await progress() == Progress(1, "input", "input", 0, "auto", 2)
    attempt = await story.begin(owner, 2)
    assert (await progress()).step_no == 1, "a step that runs has not ended"
    await steps.complete(db, owner, attempt, segments=[], output={"outcome": "tools"}, checkpoint=checkpoint(2))
    attempt = await story.begin(owner, 3, "tool")
    await steps.complete(db, owner, attempt, segments=[], output={"outcome": "settled"}, checkpoint=checkpoint(2))
    assert await progress() == Progress(3, "tool", "settled", 1, "auto", 2)
    await story.begin(owner, 4)
    await sessions.fail(db, owner.session_id, "no")
    assert await progress() == Progress(4, "failed", "", 1, "auto", 2, hold="failed")


async def test_a_move_that_the_table_does_not_have_is_refused_in_sql_too(story, db):
    owner = await story.placed()
    await _force(db, owner.session_id, "completed")
    with pytest.raises(IllegalTransition, match="a session that is completed cannot think"):
        await story.begin(owner, 1)
    with pytest.raises(asyncpg.CheckViolationError, match="cannot go from completed to idle"):
        await db.execute("UPDATE sessions SET state = 'idle'")
    with pytest.raises(asyncpg.CheckViolationError, match="cannot fall"):
        await db.execute("UPDATE sessions SET epoch = 0")


async def _force(db, session_id, state):
    await db.execute("ALTER TABLE sessions DISABLE TRIGGER guard_session_state")
    await db.execute("UPDATE sessions SET state = $2 WHERE session_id = $1", session_id, state)
    await db.execute("ALTER TABLE sessions ENABLE TRIGGER guard_session_state")


async def test_the_last_tokens_become_durable_with_the_end_of_their_step(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2)
    await steps.append_tokens(db, owner, attempt, 0, [9], "a")
    last = Sampled(1, [10, 11], "bc")
    for _ in range(2):
        await steps.complete(
            db,
            owner,
            attempt,
            segments=[Segment("scaffold", [2])],
            output={"outcome": "final"},
            checkpoint=checkpoint(6),
            to=Move.REST,
            last=last,
        )
    assert await steps.transcript(db, owner.session_id, 99) == [7, 1, 9, 10, 11, 2]
    told = await story.events()
    assert told[-4:] == ["model.delta", "step.completed", "checkpoint.created", "session.idle"]
    assert (await sessions.get(db, owner.session_id)).spent["tokens"] == 3


async def test_a_step_does_not_end_with_tokens_that_do_not_follow_its_durable_ones(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2)
    await steps.append_tokens(db, owner, attempt, 0, [9, 10], "ab")
    told = await story.events()
    with pytest.raises(StaleEpoch, match="other durable tokens"):
        await steps.complete(
            db,
            owner,
            attempt,
            segments=[],
            output={"outcome": "final"},
            checkpoint=checkpoint(4),
            last=Sampled(1, [11], "c"),
        )
    assert await story.events() == told


async def test_a_checkpoint_is_as_small_after_many_tokens_as_after_the_first(story, db):
    owner = await story.placed()
    for number in range(1, 31):
        await story.input(owner, number, [number] * 2000)
    sizes = [
        row["bytes"]
        for row in await db.fetch("SELECT pg_column_size(c.*) AS bytes FROM checkpoints c ORDER BY step_no")
    ]
    assert len(sizes) == 30
    assert max(sizes) <= sizes[0] + 16, "it refers to the transcript, and has none of it"
    assert max(sizes) < 1024
