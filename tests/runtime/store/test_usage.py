"""What was used is counted once, where it settled, whatever is repeated."""

from __future__ import annotations

import datetime
import functools
from typing import Any

import pytest

from runtime.store import Database, fleet, ledger, retention, sandboxes, sessions, steps, usage
from runtime.store.ledger import Call
from runtime.store.usage import GroupBy
from runtime.store.values import Owner, Sampled, Segment
from tests.runtime.store.conftest import Story, checkpoint

KV = {"device": 10, "host": 20, "nvme": 0, "shared": 0, "recomputed": 3, "computed": 7}
FRESH = {"device": 0, "host": 0, "nvme": 0, "shared": 0, "recomputed": 0, "computed": 100}
EVER = (datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))


async def summed(db: Database, group_by: GroupBy = "tenant") -> dict[str, Any]:
    return {one.key: one.measures for one in await usage.summed(db, group_by, fleet.DEFAULT_TENANT, *EVER)}


async def thought(story: Story, owner: Owner, no: int, tokens: list[int], **output: Any) -> None:
    attempt = await story.begin(owner, no)
    await steps.append_tokens(story.db, owner, attempt, 0, tokens[:1], "a")
    end = functools.partial(
        steps.complete,
        story.db,
        owner,
        attempt,
        segments=[],
        output=output,
        checkpoint=checkpoint(100 + no),
        last=Sampled(1, tokens[1:], "b"),
    )
    assert (await end()).mine
    assert not (await end()).mine  # as after a commit whose answer was lost


async def test_a_think_is_counted_once_with_where_its_prompt_came_from(story: Story, db: Database) -> None:
    owner = await story.placed()
    await story.input(owner, 1, [1, 2])
    await thought(story, owner, 2, [5, 6, 7], kv=KV, prefill_ms=20.0, decode_ms=30.0)
    await thought(story, owner, 3, [8, 9], kv=FRESH, prefill_ms=50.0, decode_ms=0.0)
    one = (await summed(db))[fleet.DEFAULT_TENANT]
    assert (one["steps"], one["sessions"], one["unknown_steps"]) == (3, 1, 0)
    assert (one["sampled_tokens"], one["prefilled_tokens"], one["cached_tokens"]) == (5, 110, 30)
    assert (one["device"], one["host"], one["recomputed"], one["computed"]) == (10, 20, 3, 107)
    assert one["engine_s"] == pytest.approx(0.1)
    assert one["avoided_s"] == pytest.approx(30 * 0.050 / 100)  # the think that read from a tier measures no prefill


async def test_what_nobody_knows_is_none_and_what_was_sampled_before_a_failure_counts(
    story: Story, db: Database
) -> None:
    owner = await story.placed()
    await story.input(owner, 1, [1, 2])
    attempt = await story.begin(owner, 2)
    await steps.append_tokens(db, owner, attempt, 0, [5, 6], "ab")
    await sessions.fail(db, story.session_id, "the engine said no")
    one = (await summed(db))[fleet.DEFAULT_TENANT]
    assert (one["sampled_tokens"], one["prefilled_tokens"], one["engine_s"], one["avoided_s"]) == (2, None, None, None)
    assert one["unknown_steps"] == 1
    # retried: the step goes on after its last durable token, and settles again
    await db.execute(
        "UPDATE steps SET state = 'running', error = NULL WHERE session_id = $1 AND step_no = 2", story.session_id
    )
    again = await story.begin(owner, 2)
    await steps.append_tokens(db, owner, again, 2, [7], "c")
    await db.execute("UPDATE steps SET state = 'completed' WHERE step_no = 2")
    assert (await summed(db))[fleet.DEFAULT_TENANT]["sampled_tokens"] == 3


async def test_tools_count_by_what_their_calls_took(story: Story, db: Database) -> None:
    owner = await story.placed()
    await story.input(owner, 1, [1])
    await thought(story, owner, 2, [5, 6], kv=FRESH, prefill_ms=1.0, decode_ms=1.0)
    attempt = await story.begin(owner, 3, "tool")
    for no, result in enumerate(({"reason": "exit"}, {"reason": "exit", "told": True})):
        call = Call(no, "python", {}, "sandboxed")
        await ledger.claim(db, owner, attempt, call, "r", run_in="sb_1")
        await db.execute("UPDATE tool_calls SET started_at = now() - interval '2 seconds' WHERE call_no = $1", no)
        await ledger.settle(db, owner, attempt, call, result, b"", "r")
    ended = {"outcome": "tool"}
    await steps.complete(db, owner, attempt, segments=[Segment("tool", [9])], output=ended, checkpoint=checkpoint(200))
    assert (await summed(db))[fleet.DEFAULT_TENANT]["tool_s"] == pytest.approx(2.0, abs=0.5)


async def test_sandboxes_and_stays_in_a_tier_count_while_they_last_by_day(story: Story, db: Database) -> None:
    await story.placed()
    name, tenant = story.session_id, fleet.DEFAULT_TENANT
    await sandboxes.open_one(db, tenant, name, "sb_1", "n", "fake")
    await sandboxes.keep(db, "sb_1", {})
    for tier, held in (("host", 100), ("host", 100), ("nvme", None), ("device", None), ("nvme", 300)):
        await fleet.note_residency(db, name, tenant, tier, {"held_bytes": held})
    rows = await db.fetch("SELECT name, ended_at IS NULL AS open FROM usage_intervals ORDER BY interval_id")
    assert [(row["name"], row["open"]) for row in rows] == [
        ("sb_1", True), ("host", False), ("nvme", False), ("nvme", True)
    ]  # fmt: skip
    await sandboxes.close(db, "sb_1")
    await sessions.finish(db, name, "cancelled", {})
    assert await db.fetch("SELECT FROM usage_intervals WHERE ended_at IS NULL") == []
    await db.execute("DELETE FROM usage_intervals WHERE name = 'nvme' AND bytes IS NULL")
    await db.execute("UPDATE usage_intervals SET begun_at = '2026-03-01 22:00Z', ended_at = '2026-03-02 03:00Z'")
    by_day = await summed(db, "day")
    assert {day: one["sandbox_s"] for day, one in by_day.items()} == {"2026-03-01": 7200.0, "2026-03-02": 10800.0}
    assert by_day["2026-03-02"]["nvme_byte_hours"] == pytest.approx(900)
    whole = (await summed(db, "session"))[name]
    assert (whole["sandbox_s"], whole["host_byte_hours"], whole["nvme_byte_hours"]) == (18000.0, 500.0, 1500.0)


async def test_usage_outlives_the_record_of_its_session(story: Story, db: Database) -> None:
    owner = await story.placed()
    await story.input(owner, 1, [1, 2])
    await sessions.finish(db, story.session_id, "cancelled", {})
    before = await summed(db, "session")
    await db.execute("UPDATE sessions SET updated_at = now() - interval '2 days'")
    assert await retention.sweep(db, 1) == 1
    assert await summed(db, "session") == before != {}
