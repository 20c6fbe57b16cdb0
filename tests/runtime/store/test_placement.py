"""Where a session goes."""

from __future__ import annotations

import asyncio

import pytest

from runtime.errors import Conflict, NotFound, Unavailable
from runtime.store import fleet, placement, sandboxes
from runtime.store.placement import ENGINE_AWAY_S, LOST_AFTER_S, Node, choose
from tests.runtime.store.conftest import CONFIG, Story

CARD = {"model": CONFIG["model"]}


def node(name: str, **facts: object) -> Node:
    given = {"age_s": 0.5, "engine_age_s": 0.5, "draining": False, "busy": 0, "held": 0, **facts}
    return Node(name, f"boot-{name}", f"queue-{name}", **given)  # type: ignore[arg-type]


def test_a_session_comes_back_to_its_node_however_much_that_has_to_do():
    chosen = choose("a", "", [node("a", busy=9), node("b")])
    assert chosen is not None
    assert (chosen[0].node_id, chosen[1]) == ("a", "returned")


def test_a_new_one_goes_to_the_node_that_has_least_to_do():
    chosen = choose(None, "", [node("a", busy=1), node("b", held=3), node("c", held=1)])
    assert chosen is not None
    assert (chosen[0].node_id, chosen[1]) == ("c", "new")


def test_a_heartbeat_that_is_late_moves_nobody_unless_a_step_was_lost_there():
    late = node("a", age_s=LOST_AFTER_S + 1)
    assert choose("a", "", [late, node("b")]) == (late, "returned")
    assert choose("a", "queue-of-an-earlier-life", [late, node("b")]) == (late, "returned")
    chosen = choose("a", "queue-a", [late, node("b")])
    assert chosen is not None
    assert (chosen[0].node_id, chosen[1]) == ("b", "lost")


def test_a_step_that_was_lost_on_a_node_that_lives_goes_back_to_it():
    own = node("a")
    assert choose("a", "queue-a", [own, node("b")]) == (own, "returned")


@pytest.mark.parametrize("facts", [{"draining": True}, {"engine_age_s": ENGINE_AWAY_S + 1}, {"age_s": 60.0}])
def test_nobody_goes_to_a_node_that_drains_or_is_not_there(facts):
    assert choose(None, "", [node("a", **facts)]) is None
    chosen = choose("a", "", [node("a", **facts), node("b")])
    assert chosen is not None
    assert chosen[1] == ("draining" if "draining" in facts else "lost")


async def test_sessions_that_come_at_once_are_spread(db):
    for name in ("a", "b"):
        await fleet.register_node(db, name, f"boot-{name}", f"queue-{name}", CARD, {})
    await fleet.register_node(db, "c", "boot-c", "queue-c", {"model": "another"}, {})
    stories = [Story(db) for _ in range(6)]
    for story in stories:
        await story.placed()
        await db.execute("UPDATE sessions SET node_id = NULL WHERE session_id = $1", story.session_id)
    placed = await asyncio.gather(*(placement.place(db, story.session_id) for story in stories))
    names = sorted(one.node.node_id for one in placed)
    assert names == ["a"] * 3 + ["b"] * 3


async def test_a_node_that_drains_is_told_at_its_heartbeat_and_forgets_it_in_its_next_life(db):
    await fleet.register_node(db, "a", "one", "q1", CARD, {})
    assert not await fleet.heartbeat(db, "a", "one")
    await fleet.ask_to_drain(db, "a")
    assert await fleet.heartbeat(db, "a", "one")
    story = Story(db)
    await story.placed()
    with pytest.raises(Unavailable, match="takes sessions now"):
        await placement.place(db, story.session_id)
    await fleet.register_node(db, "a", "two", "q2", CARD, {})
    assert not await fleet.heartbeat(db, "a", "two")
    assert (await placement.place(db, story.session_id)).node.queue == "q2"


async def test_the_event_says_from_where_and_why(db):
    await fleet.register_node(db, "a", "one", "q1", CARD, {})
    story = Story(db)
    owner = await story.placed()
    placed = await placement.place(db, story.session_id)
    row = await db.fetchrow(
        "SELECT data FROM events WHERE session_id = $1 AND type = 'session.placed' ORDER BY pos DESC LIMIT 1",
        story.session_id,
    )
    assert row is not None
    assert row["data"] == {"node": "a", "from": owner.node_id, "epoch": placed.epoch, "reason": "lost"}
    assert placed.epoch == owner.epoch + 1


async def placements(db, story) -> int:
    return (await story.events()).count("session.placed")


async def test_a_placement_that_nobody_heard_of_is_told_again_and_not_made_again(db):
    for name in ("a", "b"):
        await fleet.register_node(db, name, f"boot-{name}", f"queue-{name}", CARD, {})
    story = Story(db)
    known = (await story.placed()).epoch
    first = await placement.place(db, story.session_id, known=known)
    for lost in ("", first.node.queue):
        again = await placement.place(db, story.session_id, lost, known=known)
        assert (again.node.queue, again.epoch) == (first.node.queue, known + 1)
    assert await placements(db, story) == 2
    assert (await placement.place(db, story.session_id, known=first.epoch)).epoch == known + 2, "it was lost there"
    assert (await placement.place(db, story.session_id)).epoch == known + 3, "who knows of none has fenced off nobody"


@pytest.mark.parametrize("gone", ["draining", "restarted", "silent"])
async def test_a_placement_on_a_node_that_is_gone_by_now_is_made_anew(db, gone):
    await fleet.register_node(db, "a", "one", "q1", CARD, {})
    story = Story(db)
    known = (await story.placed()).epoch
    await placement.place(db, story.session_id, known=known)
    await fleet.register_node(db, "b", "one", "q2", CARD, {})
    if gone == "draining":
        await db.execute("UPDATE nodes SET draining = true WHERE node_id = 'a'")
    elif gone == "restarted":
        await fleet.register_node(db, "a", "two", "q3", CARD, {})
    else:
        await db.execute("UPDATE nodes SET heartbeat_at = now() - interval '5 s' WHERE node_id = 'a'")
    placed = await placement.place(db, story.session_id, "q1", known=known)
    assert placed.node.queue == ("q3" if gone == "restarted" else "q2")
    assert placed.epoch == known + 2


async def test_a_sandbox_is_given_up_only_by_who_has_its_session_and_when_nothing_runs_in_it(db):
    story = Story(db)
    owner = await story.placed()
    await sandboxes.open_one(db, fleet.DEFAULT_TENANT, story.session_id, "sb", owner.node_id, "fake")
    await sandboxes.keep(db, "sb", {"pid": 1})
    assert await sandboxes.give_up(db, story.session_id, owner.epoch - 1) is None
    assert await sandboxes.give_up(db, story.session_id, owner.epoch) == {"pid": 1}
    assert await sandboxes.of_session(db, story.session_id) is None


async def test_a_step_that_begins_keeps_its_sandbox_also_when_it_is_about_to_be_given_up(db):
    story = Story(db)
    owner = await story.placed()
    await sandboxes.open_one(db, fleet.DEFAULT_TENANT, story.session_id, "sb", owner.node_id, "fake")
    await sandboxes.keep(db, "sb", {"pid": 1})
    begun = asyncio.Event()
    waits = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

    async def begin(connection):
        await connection.execute("UPDATE sessions SET state = 'tool_running' WHERE session_id = $1", story.session_id)
        begun.set()
        while not await db.fetch(waits):
            await asyncio.sleep(0.01)

    beginning = asyncio.create_task(db.run(begin))
    await begun.wait()
    assert await sandboxes.give_up(db, story.session_id, owner.epoch) is None
    await beginning
    assert await sandboxes.give_up(db, story.session_id, owner.epoch) is None
    await db.execute("UPDATE sessions SET state = 'thinking' WHERE session_id = $1", story.session_id)
    assert await sandboxes.give_up(db, story.session_id, owner.epoch) == {"pid": 1}


async def test_a_node_that_is_wanted_back_takes_no_session_before_its_next_life(db):
    await fleet.register_node(db, "a", "one", "q1", CARD, {})
    with pytest.raises(Conflict, match="does not drain"):
        await fleet.ask_back(db, "a")
    with pytest.raises(NotFound):
        await fleet.ask_back(db, "nobody")
    await fleet.ask_to_drain(db, "a")
    await fleet.ask_back(db, "a")
    assert await fleet.wanted_back(db, "a", "one")
    story = Story(db)
    await story.placed()
    with pytest.raises(Unavailable, match="takes sessions now"):
        await placement.place(db, story.session_id)
    await fleet.ask_to_drain(db, "a")  # whoever says so last is right
    assert not await fleet.wanted_back(db, "a", "one")
    await fleet.ask_back(db, "a")
    await fleet.register_node(db, "a", "two", "q2", CARD, {})
    assert not await fleet.heartbeat(db, "a", "two")
    assert not await fleet.wanted_back(db, "a", "two")
    assert (await placement.place(db, story.session_id)).node.queue == "q2"
