"""What sessions wait for, and the answers; budgets and messages that come while a session works."""

import pytest

from runtime.errors import Conflict, InvalidRequest, NotFound
from runtime.store import commands, fleet, questions, sessions, standing, steps
from runtime.store.questions import Asked
from tests.runtime.store.conftest import CONFIG

TENANT = fleet.DEFAULT_TENANT
APPROVAL = Asked("approval", 0, {"name": "deploy"})


async def waiting(story, *asked: Asked):
    owner = await story.placed()
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2, "tool")
    answers = await steps.hold(story.db, owner, attempt, asked or (APPROVAL,))
    return owner, [answer.question_id for answer in answers]


async def state(story) -> tuple[str, str | None]:
    session = await sessions.get(story.db, story.session_id)
    return session.state, session.waiting_for


async def answer(story, question_id: str, **given) -> str | None:
    return await questions.answer(story.db, TENANT, question_id, given)


async def test_a_session_waits_until_its_question_is_answered_and_goes_on_at_the_same_step(story):
    owner, [question] = await waiting(story)
    assert await state(story) == ("waiting", "approval")
    assert (await story.begin(owner, 2, "tool")).held
    await answer(story, question, decision="approve")
    await commands.apply(story.db, story.session_id)
    assert await state(story) == ("tool_running", None)
    attempt = await story.begin(owner, 2, "tool")
    [known] = await steps.hold(story.db, owner, attempt, [APPROVAL])
    assert (known.state, known.decision) == ("answered", "approve")
    assert (await story.events()).count("tool.approval_required") == 1


async def test_an_answer_twice_is_a_no_op_and_another_one_is_refused(story):
    _, [question] = await waiting(story)
    assert await answer(story, question, decision="decline", reason="not today")
    assert await answer(story, question, decision="decline", reason="not today") is None
    with pytest.raises(Conflict, match="was answered before, with 'decline'; the first answer holds"):
        await answer(story, question, decision="approve")


async def test_an_answer_that_does_not_fit_its_question_is_refused(story):
    _, [question] = await waiting(story)
    with pytest.raises(InvalidRequest, match="no answer to a question about approval; use approve or decline"):
        await answer(story, question, decision="raise")


async def test_another_tenants_question_looks_like_none(story):
    _, [question] = await waiting(story)
    with pytest.raises(NotFound):
        await questions.answer(story.db, "another", question, {"decision": "approve"})


async def test_with_two_questions_the_session_waits_for_both(story):
    _, [first, second] = await waiting(story, APPROVAL, Asked("client_tool", 1, {"name": "mine"}))
    await answer(story, first, decision="approve")
    await commands.apply(story.db, story.session_id)
    assert await state(story) == ("waiting", "client_tool")
    await answer(story, second, decision="result", output="42")
    await commands.apply(story.db, story.session_id)
    assert await state(story) == ("tool_running", None)


async def test_a_question_that_nobody_answers_in_time_expires(story):
    _, [question] = await waiting(story, Asked("approval", 0, {}, expires_s=3600))
    at = await story.db.run(lambda c: standing.progress(c, story.session_id))
    assert at.hold == "approval"
    assert at.hold_until > 0
    assert 3500 < at.hold_left_s <= 3600
    await commands.apply(story.db, story.session_id)
    assert (await state(story))[0] == "waiting", "not before its time"
    await story.db.execute("UPDATE questions SET expires_at = now() - interval '1 min'")
    at = await story.db.run(lambda c: standing.progress(c, story.session_id))
    assert 0 < at.hold_left_s < 1, "an expired one is asked for at once, and not without end"
    await commands.apply(story.db, story.session_id)
    assert (await state(story))[0] == "tool_running"
    with pytest.raises(Conflict, match="expired before it was answered"):
        await answer(story, question, decision="approve")


async def test_an_approval_for_a_step_that_was_rewound_is_refused_in_a_sentence(story):
    _, [question] = await waiting(story)
    await commands.accept(story.db, TENANT, story.session_id, "c", "rewind", {"step": 1})
    await commands.apply(story.db, story.session_id)
    with pytest.raises(Conflict, match=r"about step 2 is void: its step was interrupted, rewound or ended"):
        await answer(story, question, decision="approve")


async def test_a_session_that_waits_can_be_paused_and_answered_meanwhile(story):
    _, [question] = await waiting(story)
    for verb in ("pause", "resume"):
        await commands.accept(story.db, TENANT, story.session_id, f"1{verb}", verb, {})
        await commands.apply(story.db, story.session_id)
    assert await state(story) == ("waiting", "approval")
    await commands.accept(story.db, TENANT, story.session_id, "2pause", "pause", {})
    await answer(story, question, decision="approve")
    await commands.apply(story.db, story.session_id)
    assert (await state(story))[0] == "paused"
    await commands.accept(story.db, TENANT, story.session_id, "2resume", "resume", {})
    await commands.apply(story.db, story.session_id)
    assert await state(story) == ("tool_running", None)


async def with_budget(story, **budget):
    await fleet.ensure_admin(story.db, "key")
    config = {**CONFIG, "budget": budget}
    await sessions.create(story.db, TENANT, story.session_id, config, 1)
    return await story.take_over()


async def test_a_budget_warns_once_before_its_wall_and_asks_at_it(story):
    owner = await with_budget(story, tokens=10)
    await story.input(owner, 1, [7])
    attempt = await story.begin(owner, 2)
    await steps.append_tokens(story.db, owner, attempt, 0, [1] * 7, "x")
    assert "budget.warning" not in await story.events()
    await steps.append_tokens(story.db, owner, attempt, 7, [1], "x")
    await steps.append_tokens(story.db, owner, attempt, 8, [1], "x")
    assert (await story.events()).count("budget.warning") == 1
    assert not await steps.hold_for_budget(story.db, owner, attempt)
    await steps.append_tokens(story.db, owner, attempt, 9, [1], "x")
    assert await steps.hold_for_budget(story.db, owner, attempt)
    assert await state(story) == ("waiting", "budget")
    [question] = [row["question_id"] for row in await story.db.fetch("SELECT question_id FROM questions")]
    await answer(story, question, decision="raise", budget={"tokens": 20.0})
    await commands.apply(story.db, story.session_id)
    assert (await state(story))[0] == "thinking"
    again = await story.begin(owner, 2)
    assert (again.model_tokens, again.session.budget["tokens"]) == ([1] * 10, 20.0)


@pytest.mark.parametrize("budget", [{"steps": 1}, {"tokens": 9}, {"steps": 0.5, "tokens": None}])
async def test_limits_that_leave_the_wall_where_it_is_are_no_answer(story, budget):
    owner = await with_budget(story, steps=1)
    await story.input(owner, 1, [7])
    assert (await story.begin(owner, 2)).held
    row = await story.db.fetchrow("SELECT question_id FROM questions WHERE state = 'open'")
    with pytest.raises(InvalidRequest, match=r"steps is what is used up \(1\)"):
        await answer(story, row["question_id"], decision="raise", budget=budget)
    await answer(story, row["question_id"], decision="raise", budget={"steps": None})


async def test_a_budget_that_is_used_up_again_is_asked_for_again(story):
    owner = await with_budget(story, steps=1)
    await story.input(owner, 1, [7])
    for limit in (2.0, 3.0):
        assert (await story.begin(owner, 2)).held
        row = await story.db.fetchrow("SELECT question_id FROM questions WHERE state = 'open'")
        await answer(story, row["question_id"], decision="raise", budget={"steps": limit})
        await commands.apply(story.db, story.session_id)
        await story.db.execute("UPDATE sessions SET spent_steps = spent_steps + 1")
    assert (await story.events()).count("budget.exhausted") == 2


async def test_a_budget_that_is_not_raised_ends_the_turn(story):
    owner = await with_budget(story, steps=1)
    await story.input(owner, 1, [7])
    assert (await story.begin(owner, 2)).held
    row = await story.db.fetchrow("SELECT question_id FROM questions")
    await answer(story, row["question_id"], decision="stop")
    assert (await commands.apply(story.db, story.session_id)).interrupt


async def test_a_message_that_is_not_to_wait_is_refused_while_the_session_works(story):
    owner = await story.placed()

    async def send(message_id: str) -> None:
        await sessions.accept_message(story.db, TENANT, story.session_id, message_id, "hi", {}, on_busy="reject")

    await story.input(owner, 1, [7])
    await story.begin(owner, 2)
    with pytest.raises(Conflict, match=r"is busy \(thinking\); wait until it rests"):
        await send("m1")
    await sessions.fail(story.db, story.session_id, "no")
    await send("m2")
    await send("m2")
    with pytest.raises(Conflict, match="is busy"):
        await send("m3")
