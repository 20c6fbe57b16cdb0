import asyncio

import pytest

from runtime.errors import StaleEpoch, TenutoError
from runtime.store import ledger, steps
from runtime.store.ledger import Call
from runtime.store.questions import Asked

CALL = Call(0, "bash", {"command": "true"}, "sandboxed")


async def at_a_tool_step(story):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    await story.db.execute("UPDATE sessions SET state = 'thinking'")
    return owner, await story.begin(owner, 2, "tool")


async def test_a_settled_call_gives_its_recorded_result_to_every_later_claim(story, db):
    owner, attempt = await at_a_tool_step(story)
    await ledger.claim(db, owner, attempt, CALL, "before")
    await ledger.note_run(db, owner, attempt, CALL, 1, "sb1")
    await ledger.settle(db, owner, attempt, CALL, {"reason": "exit", "code": 0}, b"out", "after")
    claim = await ledger.claim(db, owner, attempt, CALL, "other")
    assert claim.result == {"reason": "exit", "code": 0}
    assert (claim.output, claim.snapshot_before, claim.snapshot_after) == (b"out", "before", "after")
    assert (await story.events()).count("tool.settled") == 1


async def test_a_run_is_known_before_it_happens(story, db):
    owner, attempt = await at_a_tool_step(story)
    assert (await ledger.claim(db, owner, attempt, CALL, "before")).runs == 0
    await ledger.note_run(db, owner, attempt, CALL, 1, "sb1")
    await ledger.note_run(db, owner, attempt, CALL, 1, "sb1")
    claim = await ledger.claim(db, await story.take_over(), attempt, CALL, "before")
    assert (claim.runs, claim.sandbox_id) == (1, "sb1")
    assert (await story.events()).count("tool.started") == 1


async def test_a_call_can_be_claimed_together_with_its_first_run(story, db):
    owner, attempt = await at_a_tool_step(story)
    claim = await ledger.claim(db, owner, attempt, CALL, "before", run_in="sb1")
    assert (claim.runs, claim.sandbox_id, claim.begins) == (1, "sb1", True)
    again = await ledger.claim(db, await story.take_over(), attempt, CALL, "before", run_in="sb2")
    assert (again.runs, again.sandbox_id, again.begins) == (1, "sb1", False)
    assert (await story.events()).count("tool.requested") == (await story.events()).count("tool.started") == 1


async def test_an_older_owner_cannot_settle_what_a_newer_one_claimed(story, db):
    zombie, attempt = await at_a_tool_step(story)
    await ledger.claim(db, zombie, attempt, CALL, "before")
    owner = await story.take_over()
    await ledger.claim(db, owner, attempt, CALL, "before")
    with pytest.raises(StaleEpoch):
        await ledger.settle(db, zombie, attempt, CALL, {"reason": "exit", "code": 1}, b"", "after")
    await ledger.settle(db, owner, attempt, CALL, {"reason": "exit", "code": 0}, b"", "after")
    await ledger.settle(db, owner, attempt, CALL, {"reason": "exit", "code": 0}, b"", "after")


async def test_the_same_place_with_other_arguments_is_an_alarm(story, db):
    owner, attempt = await at_a_tool_step(story)
    await ledger.claim(db, owner, attempt, CALL, "before")
    with pytest.raises(TenutoError, match="recorded with other arguments"):
        await ledger.claim(db, owner, attempt, Call(0, "bash", {"command": "false"}, "sandboxed"), "before")


async def test_claims_at_the_same_moment_make_one_row_and_one_event(story, db):
    owner, attempt = await at_a_tool_step(story)
    await asyncio.gather(*(ledger.claim(db, owner, attempt, CALL, "before") for _ in range(5)))
    assert (await story.events()).count("tool.requested") == 1


async def test_an_unknown_outcome_is_told_once_and_can_still_be_settled(story, db):
    owner, attempt = await at_a_tool_step(story)
    await ledger.claim(db, owner, attempt, CALL, "before")
    asked = [Asked("outcome", 0, {"name": "bash"})]
    for _ in range(2):
        [answer] = await steps.hold(db, owner, attempt, asked, unknown=[0])
        assert answer.state == "open"
    assert (await story.events()).count("tool.outcome_unknown") == 1
    await ledger.settle(db, owner, attempt, CALL, {"reason": "exit", "code": 0}, b"", "after")
