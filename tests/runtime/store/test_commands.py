"""Pause, resume, retry, rewind and fork, as the record knows them."""

import pytest

from runtime.errors import Conflict, InvalidRequest, NotFound, StaleEpoch
from runtime.store import branches, commands, fleet, sessions, standing, steps
from runtime.store.values import Segment
from tests.runtime.store.conftest import checkpoint

TENANT = fleet.DEFAULT_TENANT


async def ask(story, verb: str, command_id: str = "", **argument) -> None:
    command_id = command_id or sessions.new_id("cmd")
    await commands.accept(story.db, TENANT, story.session_id, command_id, verb, argument)


async def state(story) -> str:
    return (await sessions.get(story.db, story.session_id)).state


async def progress(story):
    return await story.db.run(lambda c: standing.progress(c, story.session_id))


async def think(story, owner, no: int, ids: list[int], outcome: str = "final") -> None:
    attempt = await story.begin(owner, no)
    await steps.append_tokens(story.db, owner, attempt, 0, ids, "x")
    await steps.complete(
        story.db,
        owner,
        attempt,
        segments=[],
        output={"outcome": outcome, "calls": [], "text": "x"},
        checkpoint=checkpoint(attempt.token_start + 1 + len(ids), bytes([no]) * 32, root=f"root{no}"),
        to=sessions.Move.REST if outcome == "final" else None,
    )


async def tool(story, owner, no: int, ids: list[int]) -> None:
    attempt = await story.begin(owner, no, "tool")
    await steps.complete(
        story.db,
        owner,
        attempt,
        segments=[Segment("tool", ids)],
        output={"outcome": "settled"},
        checkpoint=checkpoint(attempt.token_start + len(ids), root=f"root{no}"),
    )


async def two_rounds(story):
    """input 1, think 2 (tools), tool 3, think 4 (final)."""
    owner = await story.placed()
    await story.input(owner, 1, [7])
    await think(story, owner, 2, [8, 9], "tools")
    await tool(story, owner, 3, [10])
    await think(story, owner, 4, [11])
    return owner


async def test_a_paused_session_begins_nothing_until_it_is_resumed(story):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2)
    await steps.append_tokens(story.db, owner, attempt, 0, [5, 6], "ab")
    await ask(story, "pause")
    await commands.apply(story.db, story.session_id)
    assert await state(story) == "paused"
    assert (await progress(story)).hold == "paused"
    assert (await story.begin(owner, 2)).held
    await ask(story, "resume")
    await commands.apply(story.db, story.session_id)
    assert await state(story) == "thinking"
    again = await story.begin(owner, 2)
    assert (again.held, again.model_tokens, again.attempt_no) == (False, [5, 6], 2)


async def test_a_command_is_applied_once_however_often_it_is_sent(story):
    await two_rounds(story)
    for _ in range(3):
        await ask(story, "pause", "cmd_1")
        await commands.apply(story.db, story.session_id)
    assert (await story.events()).count("session.paused") == 1


async def test_a_resume_right_behind_a_pause_is_accepted_though_neither_is_applied(story):
    await two_rounds(story)
    await ask(story, "pause")
    await ask(story, "resume")
    await commands.apply(story.db, story.session_id)
    assert await state(story) == "idle"


@pytest.mark.parametrize(("verb", "argument"), [("resume", {}), ("retry", {}), ("rewind", {"step": 9})])
async def test_what_the_state_does_not_allow_is_refused_in_a_sentence_and_changes_nothing(story, verb, argument):
    await two_rounds(story)
    with pytest.raises((Conflict, InvalidRequest), match=r"is idle: only|has no checkpoint at step 9"):
        await ask(story, verb, **argument)
    assert await story.db.fetch("SELECT 1 FROM commands") == []
    assert await state(story) == "idle"


async def test_another_tenant_has_no_such_session(story):
    await two_rounds(story)
    with pytest.raises(NotFound):
        await commands.accept(story.db, "another", story.session_id, "c", "pause", {})


async def test_a_retry_begins_at_the_step_that_failed_with_what_was_durable(story):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2)
    await steps.append_tokens(story.db, owner, attempt, 0, [5, 6], "ab")
    await sessions.fail(story.db, story.session_id, "the engine was on fire")
    await ask(story, "retry")
    await commands.apply(story.db, story.session_id)
    assert await state(story) == "thinking"
    assert ((await progress(story)).step_no, (await progress(story)).hold) == (1, "")
    again = await story.begin(owner, 2)
    assert (again.model_tokens, again.attempt_no) == ([5, 6], 2)


async def test_a_retried_input_gives_its_message_back(story):
    owner = await story.placed()
    message = await story.message("too long")
    await story.begin(owner, 1, "input", message=message)
    await sessions.fail(story.db, story.session_id, "it does not fit")
    assert (await progress(story)).unread == 0
    await ask(story, "retry")
    await commands.apply(story.db, story.session_id)
    assert ((await progress(story)).unread, await state(story)) == (1, "idle")
    assert (await sessions.message_to_take(story.db, story.session_id, 2))[0] == message


async def test_a_rewound_session_is_where_the_checkpoint_was_and_the_steps_behind_stay_in_the_record(story):
    owner = await two_rounds(story)
    whole = await steps.transcript(story.db, story.session_id, 99)
    await ask(story, "rewind", step=2)
    applied = await commands.apply(story.db, story.session_id)
    assert applied.moved
    assert await steps.transcript(story.db, story.session_id, 99) == whole[:4]
    at = await progress(story)
    assert (at.step_no, at.kind, at.outcome, at.rounds, at.hold) == (5, "think", "tools", 0, "paused")
    row = await story.db.fetchrow("SELECT * FROM checkpoints WHERE session_id = $1 AND step_no = 5", story.session_id)
    assert (row["token_count"], row["workspace_root"], row["kv_tail"]) == (4, "root2", bytes([2]) * 32)
    assert len(await story.db.fetch("SELECT 1 FROM steps WHERE NOT live")) == 2
    await ask(story, "resume")
    await commands.apply(story.db, story.session_id)
    assert await state(story) == "tool_running"
    owner = await story.take_over()
    await tool(story, owner, 6, [12])
    assert await steps.transcript(story.db, story.session_id, 99) == [*whole[:4], 12]


async def test_a_rewind_can_itself_be_taken_back(story):
    await two_rounds(story)
    whole = await steps.transcript(story.db, story.session_id, 99)
    for step in (1, 4):
        await ask(story, "rewind", step=step)
        await commands.apply(story.db, story.session_id)
    assert await steps.transcript(story.db, story.session_id, 99) == whole
    assert await state(story) == "idle"


async def test_a_rewind_with_a_seed_samples_anew_and_the_checkpoints_before_keep_theirs(story):
    await two_rounds(story)
    await ask(story, "rewind", step=1, seed=42)
    await commands.apply(story.db, story.session_id)
    assert (await sessions.get(story.db, story.session_id)).seed == 42
    rows = await story.db.fetch("SELECT seed FROM checkpoints ORDER BY step_no")
    assert {row["seed"] for row in rows} == {1}


async def test_a_message_whose_input_step_was_rewound_is_taken_later(story):
    owner = await two_rounds(story)
    message = await story.message("later")
    await story.begin(owner, 5, "input", message=message)
    await ask(story, "rewind", step=4)
    await commands.apply(story.db, story.session_id)
    assert (await progress(story)).unread == 1
    assert (await sessions.message_to_take(story.db, story.session_id, 7))[0] == message


async def test_a_fork_begins_with_the_record_up_to_its_checkpoint_and_goes_its_own_way(story):
    await two_rounds(story)
    whole = await steps.transcript(story.db, story.session_id, 99)
    await branches.fork(story.db, TENANT, story.session_id, "ses_child", 2, 5)
    await branches.fork(story.db, TENANT, story.session_id, "ses_child", 2, 5)
    assert await steps.transcript(story.db, "ses_child", 99) == whole[:4]
    assert await steps.transcript(story.db, story.session_id, 99) == whole
    child = await sessions.get(story.db, "ses_child")
    assert (child.state, child.seed) == ("paused", 5)
    at = await story.db.run(lambda c: standing.progress(c, "ses_child"))
    assert (at.step_no, at.kind, at.outcome, at.tool_choice, at.max_tool_rounds) == (2, "think", "tools", "auto", 2)
    rows = await story.db.fetch(
        "SELECT session_id, kv_new, workspace_root FROM checkpoints WHERE step_no = 2 ORDER BY session_id"
    )
    assert len(rows) == 2
    assert rows[0]["kv_new"] == rows[1]["kv_new"] == [bytes([2]) * 32]


async def test_a_fork_of_a_session_that_rests_rests(story):
    await two_rounds(story)
    await branches.fork(story.db, TENANT, story.session_id, "ses_child", None, None)
    assert (await sessions.get(story.db, "ses_child")).state == "idle"


async def test_a_session_that_has_ended_cannot_be_forked_since_its_files_went_with_it(story):
    await two_rounds(story)
    await sessions.request_end(story.db, TENANT, story.session_id)
    with pytest.raises(Conflict, match="its workspace went with it"):
        await branches.fork(story.db, TENANT, story.session_id, "ses_child", None, None)


async def test_pages_that_a_fork_names_are_not_its_parents_alone(story):
    await two_rounds(story)
    assert len(await fleet.private_pages(story.db, story.session_id)) == 2
    await branches.fork(story.db, TENANT, story.session_id, "ses_child", 2, None)
    assert await fleet.private_pages(story.db, story.session_id) == [(bytes([4]) * 32).hex()]


async def test_only_a_session_at_rest_can_be_completed(story):
    owner = await two_rounds(story)
    await story.message()
    with pytest.raises(Conflict, match="idle with 1 messages waiting: only one at rest can be completed"):
        await sessions.request_end(story.db, TENANT, story.session_id, "completed")
    await story.db.execute("UPDATE messages SET state = 'consumed'")
    await sessions.request_end(story.db, TENANT, story.session_id, "completed")
    with pytest.raises(Conflict, match="being completed and takes no more messages"):
        await story.message()
    await sessions.finish(story.db, story.session_id, "completed", {})
    assert await state(story) == "completed"
    assert owner.epoch == 1


async def command_states(story) -> dict[str, str]:
    rows = await story.db.fetch("SELECT verb, state FROM commands ORDER BY seq")
    return {row["verb"]: row["state"] for row in rows}


@pytest.mark.parametrize("applied", [False, True])
async def test_a_command_that_meets_a_completion_changes_nothing_any_more(story, applied):
    await two_rounds(story)
    await ask(story, "pause")
    await sessions.request_end(story.db, TENANT, story.session_id, "completed")
    if applied:
        await commands.apply(story.db, story.session_id)
    await sessions.finish(story.db, story.session_id, "completed", {})
    assert await state(story) == "completed"
    assert await command_states(story) == {"pause": "refused"}
    assert (await story.events())[-2:] == ["command.refused", "session.completed"]


async def test_a_completion_that_a_cancel_overtakes_ends_as_cancelled(story):
    await two_rounds(story)
    await sessions.request_end(story.db, TENANT, story.session_id, "completed")
    await sessions.request_end(story.db, TENANT, story.session_id, "cancelled")
    await sessions.finish(story.db, story.session_id, "completed", {})
    assert await state(story) == "cancelled"
    assert (await story.events())[-1] == "session.cancelled"


async def test_a_paused_session_can_fail(story):
    await two_rounds(story)
    await ask(story, "pause")
    await commands.apply(story.db, story.session_id)
    await sessions.fail(story.db, story.session_id, "it could not be interrupted")
    assert await state(story) == "failed"


async def test_a_session_that_was_just_placed_can_be_paused(story):
    await story.placed()
    await ask(story, "pause")
    await commands.apply(story.db, story.session_id)
    assert await state(story) == "paused"


async def test_an_interrupt_that_is_applied_before_its_word_came_still_ends_what_runs(story):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    await story.begin(owner, 2)
    await ask(story, "interrupt")
    await ask(story, "pause")
    assert (await commands.apply(story.db, story.session_id)).interrupt


@pytest.mark.parametrize(("order", "interrupts"), [(["interrupt", "rewind"], False), (["rewind", "interrupt"], True)])
async def test_an_interrupt_ends_what_it_was_asked_to_end_and_not_what_was_rewound_to_after_it(
    story, order, interrupts
):
    owner = await two_rounds(story)
    await story.input(owner, 5, [7])
    await story.begin(owner, 6)
    for verb in order:
        await ask(story, verb, **({"step": 2, "resume": True} if verb == "rewind" else {}))
    applied = await commands.apply(story.db, story.session_id)
    assert (applied.moved, applied.interrupt) == (True, interrupts)


async def test_who_held_a_session_that_was_rewound_writes_nothing_from_then_on(story):
    owner = await two_rounds(story)
    await story.input(owner, 5, [7])
    attempt = await story.begin(owner, 6)
    await ask(story, "rewind", step=1, resume=True)
    await commands.apply(story.db, story.session_id)
    with pytest.raises(StaleEpoch):
        await steps.append_tokens(story.db, owner, attempt, 0, [5], "a")
    assert await state(story) == "thinking"


async def test_a_step_that_failed_is_not_completed_by_who_comes_late(story):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2)
    await sessions.fail(story.db, story.session_id, "lost again and again")
    with pytest.raises(StaleEpoch, match="step 2 is failed"):
        await steps.complete(
            story.db, owner, attempt, segments=[], output={"outcome": "tools"}, checkpoint=checkpoint(2)
        )
    with pytest.raises(StaleEpoch, match="step 2 is a think that is failed"):
        await story.begin(owner, 2)
    assert await state(story) == "failed"


@pytest.mark.parametrize("left_by", ["rewind", "message"])
async def test_children_of_a_step_that_is_left_behind_are_cancelled_and_no_others(story, left_by):
    owner = await two_rounds(story)
    await think(story, owner, 5, [8], "tools")
    await story.begin(owner, 6, "tool")
    for child, step in (("ses_kept", 3), ("ses_left", 6)):
        about = story.db, TENANT, child, {"model": "m"}, 1
        await sessions.create(*about, parent=(story.session_id, step, 0))
    if left_by == "rewind":
        await ask(story, "rewind", step=4)
        await commands.apply(story.db, story.session_id)
    else:
        await sessions.fail(story.db, story.session_id, "no")
        assert (await sessions.get(story.db, "ses_left")).state == "created", "a retry may still want its answer"
        await story.input(owner, 7, [9])
    assert (await sessions.get(story.db, "ses_left")).state == "cancelling"
    assert (await sessions.get(story.db, "ses_kept")).state == "created"


async def compaction(story, owner, no: int) -> None:
    attempt = await story.begin(owner, no, "compaction")
    at = await progress(story)
    await steps.complete(
        story.db,
        owner,
        attempt,
        segments=[],
        output={"outcome": "compacted", "after": {"kind": at.kind, "outcome": at.outcome}},
        checkpoint=checkpoint(attempt.token_start),
    )


async def test_who_goes_back_to_a_compaction_is_not_compacted_again_before_something_was_said(story):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    await compaction(story, owner, 2)
    assert (await progress(story)).compacted
    await think(story, owner, 3, [8])
    assert not (await progress(story)).compacted
    for to in (2, 4):  # the compaction, and then the step that says that it was gone back to
        await ask(story, "rewind", step=to)
        await commands.apply(story.db, story.session_id)
        at = await progress(story)
        assert (at.kind, at.compacted) == ("input", True)
    await ask(story, "resume")
    await commands.apply(story.db, story.session_id)
    await think(story, await story.take_over(), 6, [9])
    assert not (await progress(story)).compacted


@pytest.mark.parametrize("again", ["apply/1", "apply/2"])
async def test_commands_whose_application_was_not_heard_of_are_reported_again_to_who_applied_them_alone(story, again):
    owner = await two_rounds(story)
    await story.input(owner, 5, [7])
    await story.begin(owner, 6)
    await ask(story, "rewind", step=2, resume=True)
    await ask(story, "interrupt")
    first = await commands.apply(story.db, story.session_id, "apply/1")
    assert (first.moved, first.interrupt) == (True, True)
    events = await story.events()
    same = again == "apply/1"
    repeated = await commands.apply(story.db, story.session_id, again)
    assert (repeated.moved, repeated.interrupt) == (same, same)
    assert await story.events() == events
