import pytest

from runtime.errors import Conflict, NotFound, Unauthorized
from runtime.store import fleet, keys, sessions, steps
from tests.runtime.store.conftest import checkpoint

TENANT = fleet.DEFAULT_TENANT


async def state(db, session_id):
    return (await sessions.get(db, session_id)).state


async def test_a_session_created_twice_is_one(story, db):
    await story.placed()
    await sessions.create(db, TENANT, story.session_id, {"model": "other"}, 9)
    assert (await sessions.get(db, story.session_id)).seed == 1
    assert (await story.events()).count("session.created") == 1


async def test_a_message_accepted_twice_is_one(story, db):
    await story.placed()
    for _ in range(2):
        await sessions.accept_message(db, TENANT, story.session_id, "msg_1", "hi", {})
    assert (await story.events()).count("message.accepted") == 1


async def test_another_tenant_finds_no_session_to_write_to(story, db):
    await story.placed()
    with pytest.raises(NotFound):
        await sessions.accept_message(db, "somebody", story.session_id, "msg_1", "hi", {})
    with pytest.raises(NotFound):
        await sessions.request_end(db, "somebody", story.session_id)


async def test_cancel_says_cancelling_until_everything_is_free(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    await story.begin(owner, 2)
    assert await sessions.request_end(db, TENANT, story.session_id) == "cancelling"
    assert await sessions.request_end(db, TENANT, story.session_id) == "cancelling"
    with pytest.raises(Conflict, match="takes no more messages"):
        await story.message()
    await sessions.finish(db, story.session_id, "cancelled", {"pages": 3})
    await sessions.finish(db, story.session_id, "cancelled", {"pages": 0})
    assert await state(db, story.session_id) == "cancelled"
    told = await story.events()
    assert told.count("session.cancelled") == 1
    assert "step.cancelled" in told


async def test_a_failed_step_answers_its_message_and_the_session_goes_on(story, db):
    owner = await story.placed()
    message = await story.message()
    await story.begin(owner, 1, "input", message=message)
    await sessions.fail(db, story.session_id, "too long")
    await sessions.fail(db, story.session_id, "too long")
    assert await state(db, story.session_id) == "failed"
    assert (await story.events()).count("session.failed") == 1
    left = await db.fetch("SELECT 1 FROM messages WHERE state = 'accepted'")
    assert not left
    await story.input(await story.take_over(), 2, [7])
    assert await state(db, story.session_id) == "thinking"


async def test_only_pages_that_no_other_open_session_names_are_private(story, db):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2)
    await steps.complete(db, owner, attempt, segments=[], output={}, checkpoint=checkpoint(2, b"shared", b"mine"))
    other = type(story)(db)
    theirs = await other.placed()
    await other.input(theirs, 1, [7])
    attempt = await other.begin(theirs, 2)
    await steps.complete(db, theirs, attempt, segments=[], output={}, checkpoint=checkpoint(2, b"shared"))
    assert await fleet.private_pages(db, story.session_id) == [b"mine".hex()]
    await sessions.finish(db, other.session_id, "cancelled", {})
    assert set(await fleet.private_pages(db, story.session_id)) == {b"mine".hex(), b"shared".hex()}


async def test_a_key_is_kept_as_its_hash_only(db):
    await fleet.ensure_admin(db, "tk_secret")
    await fleet.ensure_admin(db, "tk_secret")
    assert (await keys.caller(db, "tk_secret")).tenant_id == TENANT
    with pytest.raises(Unauthorized):
        await keys.caller(db, "tk_other")
    rows = await db.fetch("SELECT to_jsonb(k)::text AS row FROM api_keys k")
    assert len(rows) == 1
    assert "tk_secret" not in rows[0]["row"]


async def test_messages_are_taken_in_the_order_in_which_they_were_accepted(story, db):
    owner = await story.placed()
    first, second = await story.message("one"), await story.message("two")
    assert (await sessions.message_to_take(db, story.session_id, 1))[:2] == (first, "one")
    await story.begin(owner, 1, "input", message=first)
    assert (await sessions.message_to_take(db, story.session_id, 1))[:2] == (first, "one"), "a step keeps its message"
    await db.execute("UPDATE messages SET state = 'consumed' WHERE message_id = $1", first)
    assert (await sessions.message_to_take(db, story.session_id, 2))[:2] == (second, "two")
    await db.execute("UPDATE messages SET state = 'consumed'")
    assert await sessions.message_to_take(db, story.session_id, 3) is None
