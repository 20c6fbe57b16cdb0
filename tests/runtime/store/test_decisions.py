"""The decision log in the record."""

from __future__ import annotations

from typing import Any

from runtime.store import Database, decisions
from tests.runtime.store.conftest import Story


def entry(session: str, seq: int, **changes: Any) -> dict[str, Any]:
    return {
        "seq": seq,
        "session": session,
        "step": 2,
        "at_s": 1_700_000_000.0 + seq,
        "reason": "tool_started",
        "action": "store",
        "place": "host",
        "tokens": 64,
        "bytes": 4096,
        "predicted_s": 0.5,
        "realised_s": None,
        "instead_s": 2.0,
        "status": "open",
        "detail": "",
        **changes,
    }


async def test_decisions_are_told_in_the_order_in_which_they_were_made(db: Database, story: Story) -> None:
    await story.placed()
    name = story.session_id
    assert await decisions.write(db, "boot-b", [entry(name, 2), entry(name, 1)]) == 2
    rows = await decisions.of_session(db, name)
    assert [(row["engine_boot"], row["seq"], row["step_no"]) for row in rows] == [("boot-b", 1, 2), ("boot-b", 2, 2)]
    later = await decisions.of_session(db, name, after=("boot-b", 1))
    assert [row["seq"] for row in later] == [2]


async def test_a_decision_that_is_settled_replaces_itself(db: Database, story: Story) -> None:
    await story.placed()
    name = story.session_id
    await decisions.write(db, "boot", [entry(name, 1)])
    await decisions.write(db, "boot", [entry(name, 1, realised_s=0.7, status="done", detail="slow disk")])
    (row,) = await decisions.of_session(db, name)
    assert (row["realised_s"], row["status"], row["detail"]) == (0.7, "done", "slow disk")


async def test_two_engines_may_count_alike(db: Database, story: Story) -> None:
    await story.placed()
    for boot in ("a", "b"):
        await decisions.write(db, boot, [entry(story.session_id, 1)])
    assert len(await decisions.of_session(db, story.session_id)) == 2


async def test_sessions_that_the_record_does_not_know_are_left_out(db: Database, story: Story) -> None:
    await story.placed()
    assert await decisions.write(db, "boot", [entry("somebody", 1), entry(story.session_id, 2)]) == 1
    assert await decisions.write(db, "boot", []) == 0


async def test_what_no_text_column_can_hold_does_not_stop_the_rest(db: Database, story: Story) -> None:
    await story.placed()
    name = story.session_id
    strange = [entry("nul\0", 1), entry("half \ud800", 2), entry(name, 3, detail="half \ud800 nul\0 whole")]
    assert await decisions.write(db, "boot", [*strange, entry(name, 4)]) == 2
    first, second = await decisions.of_session(db, name)
    assert (first["detail"], second["seq"]) == ("half ? nul? whole", 4)
