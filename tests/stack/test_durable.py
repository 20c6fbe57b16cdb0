"""What is done to sessions that live: pause, resume, interrupt, retry, rewind, fork, approvals, budgets, compaction."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import tenuto

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

NOTE = {
    "name": "note",
    "description": "Write a note down.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "enum": ["tide", "ferry"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
    "command": ["sh", "-c", "echo mark >> /work/notes; wc -l < /work/notes"],
    "effect": "sandboxed",
}
SLOW = {**NOTE, "name": "slow", "command": ["sh", "-c", "echo begun >> /work/notes; sleep 600"], "timeout_s": 900}
LONG = {"max_think_tokens": 400}
STORY = "Tell me a long story about a ferry."
TELLING = {"limits": LONG, "sampling": {"temperature": 0.8}, "seed": 3}  # a think of a few seconds


async def follow(session, after: int = 0):
    """Events as they come, closed when left."""
    stream = session.stream(after)
    try:
        async for event in stream:
            yield event
    finally:
        await stream.aclose()


async def seen(session, kind: str, after: int = 0, **data) -> tenuto.Event:
    async for event in follow(session, after):
        if event.type == "session.failed" and kind != "session.failed":
            raise AssertionError(event.data)
        if event.type == kind and data.items() <= event.data.items():
            return event
    raise AssertionError(f"the session ended without {kind}")


async def notes(session) -> int:
    """Lines that the last call of `note` counted."""
    events = [event for event in await session.events() if event.type == "tool.settled"]
    return int(events[-1].data["preview"])


async def think_tokens(session, step: int) -> list[int]:
    return [
        token
        for event in await session.events()
        if event.type == "model.delta" and event.step == step
        for token in event.data["token_ids"]
    ]


async def test_a_paused_think_goes_on_at_its_next_token_and_ends_as_an_undisturbed_one(client):
    made = {"limits": {"max_think_tokens": 120}, "sampling": {"temperature": 0.8}, "seed": 3}
    calm = await client.sessions.create(**made)
    await calm.run(STORY)
    session = await client.sessions.create(**made)
    await session.send(STORY)
    await seen(session, "model.delta")
    assert (await session.pause()).state == "paused"
    before = await think_tokens(session, 2)
    await session.resume()
    await session.until("idle")
    assert 0 < len(before) < len(await think_tokens(session, 2))
    assert await think_tokens(session, 2) == await think_tokens(calm, 2)
    assert await session.token_ids() == await calm.token_ids()
    for one in (calm, session):
        await one.cancel()


async def test_a_message_can_interrupt_a_think_and_what_was_said_stays(client):
    session = await client.sessions.create(**TELLING)
    await session.send(STORY)
    await seen(session, "model.delta")
    turn = await session.run("Stop. Say yes.", on_busy="interrupt")
    assert turn.outcome in ("final", "incomplete")
    kinds = [(step["kind"], step["output"]["outcome"]) for step in await session.steps()]
    assert kinds[:3] == [("input", "input"), ("think", "interrupted"), ("input", "input")]
    await session.cancel()


async def test_an_interrupted_tool_is_dead_and_told_so_and_the_session_goes_on(client):
    session = await client.sessions.create(tools=[SLOW], limits=LONG)
    await session.send("Use the tool.", tool_choice="required", max_tool_rounds=1)
    await seen(session, "tool.started")
    assert (await session.interrupt()).state == "idle"
    settled = await seen(session, "tool.settled")
    assert settled.data["reason"] == "interrupted"
    turn = await session.run("Say yes.", tool_choice="none")
    assert turn.outcome in ("final", "incomplete")
    await session.cancel()


async def test_a_busy_session_refuses_a_message_that_is_not_to_wait(client):
    session = await client.sessions.create(**TELLING, on_busy="reject")
    await session.send(STORY)
    await seen(session, "model.delta")
    with pytest.raises(tenuto.APIError, match="busy"):
        await session.send("Now.")
    await session.cancel()


async def test_an_approval_lets_the_call_run_and_a_decline_is_told_with_its_reason(client, stack):
    session = await client.sessions.create(tools=[NOTE], approvals={"note": {}}, limits=LONG)
    await session.send("Note it.", tool_choice="required", max_tool_rounds=2)
    await session.until("waiting")
    [question] = await session.questions()
    assert (question.kind, question.about["name"]) == ("approval", "note")
    old = stack.kill("worker")
    await stack.restarted("worker", old)
    after = await session.position()
    await client.answer(question.id, "approve")
    await client.answer(question.id, "approve")
    await seen(session, "session.waiting", after)
    assert await notes(session) == 1
    [question] = await session.questions()
    await client.answer(question.id, "decline", reason="one is enough")
    await session.until("idle")
    settled = [event for event in await session.events() if event.type == "tool.settled"]
    assert (settled[-1].data["reason"], settled[-1].data["preview"]) == ("refused", "it was declined: one is enough")
    await session.cancel()


async def test_an_approval_that_nobody_gives_is_declined_at_its_deadline(client):
    session = await client.sessions.create(tools=[NOTE], approvals={"*": {"deadline_s": 0.5}}, limits=LONG)
    await session.send("Note it.", tool_choice="required", max_tool_rounds=1)
    settled = await seen(session, "tool.settled")
    assert "nobody gave it in time" in settled.data["preview"]
    await session.until("idle")
    await session.cancel()


async def test_a_budget_that_is_used_up_waits_and_goes_on_with_the_next_token(client):
    made = {"limits": {"max_think_tokens": 60}, "sampling": {"temperature": 0.8}, "seed": 5}
    calm = await client.sessions.create(**made)
    await calm.run(STORY)
    session = await client.sessions.create(**made, budget={"tokens": 25})
    await session.send(STORY)
    info = await session.until("waiting")
    assert (info.waiting_for, info.spent["tokens"]) == ("budget", 25)
    types = [event.type for event in await session.events()]
    assert types.index("budget.warning") < types.index("budget.exhausted")
    [question] = await session.questions()
    await client.answer(question.id, "raise", budget={"tokens": 1000})
    await session.until("idle")
    assert await session.token_ids() == await calm.token_ids()
    for one in (calm, session):
        await one.cancel()


async def failed_in_its_tool(client, stack) -> tenuto.AsyncSession:
    """A session whose tool step failed, since its snapshots were away."""
    blobs = stack.settings.blobs_dir
    session = await client.sessions.create(tools=[NOTE], files={"a.txt": "a"}, limits=LONG)
    hidden = blobs.with_name("blobs-away")
    await session.send("Note it.", tool_choice="required", max_tool_rounds=1)
    await seen(session, "step.completed")
    # What the node has promised and not put in its place yet would come there, whatever the place is called by then.
    while any(journal.stat().st_size for journal in (blobs / "journal").iterdir()):
        await asyncio.sleep(0.005)
    blobs.rename(hidden)
    try:
        assert (await seen(session, "session.failed")).data["message"]
    finally:
        if blobs.exists():
            for path in sorted(blobs.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            blobs.rmdir()
        hidden.rename(blobs)
    return session


async def test_a_failed_session_is_retried_at_the_step_that_failed(client, stack):
    session = await failed_in_its_tool(client, stack)
    await session.retry()
    await session.until("idle")
    steps = await session.steps()
    assert [step["kind"] for step in steps] == ["input", "think", "tool", "think"]
    assert (steps[0]["attempts"], steps[1]["attempts"], steps[2]["attempts"] > 1) == (1, 1, True)
    assert await notes(session) == 1
    await session.cancel()


async def test_a_call_whose_step_failed_has_a_result_before_the_next_message(client, stack):
    session = await failed_in_its_tool(client, stack)
    turn = await session.run("Say yes.", tool_choice="none")
    assert turn.outcome in ("final", "incomplete")
    page = await client.get(f"/v1/sessions/{session.id}/transcript")
    kinds = [segment["kind"] for segment in page["data"] if segment["step"] == 4]
    assert kinds == ["tool", "message"]
    await session.cancel()


async def test_rewind_takes_transcript_and_workspace_back_and_fork_goes_its_own_way(client):
    session = await client.sessions.create(tools=[NOTE], limits=LONG)
    for _ in range(2):
        await session.run("Note it.", tool_choice="required", max_tool_rounds=1)
    assert await notes(session) == 2
    whole = await session.token_ids()
    fork = await session.fork(4)
    info = await session.rewind(4)
    assert (info.state, info.tokens) == ("idle", len(await session.token_ids()))
    assert await session.token_ids() == whole[: info.tokens] == await fork.token_ids()
    for one in (session, fork):
        await one.run("Note it.", tool_choice="required", max_tool_rounds=1)
        assert await notes(one) == 2, "the workspace of the checkpoint, not of what came after"
    assert await session.token_ids() == await fork.token_ids() == whole
    dead = [step["id"] for step in await session.steps() if not step["live"]]
    assert dead == [5, 6, 7, 8]
    await session.rewind(8)
    assert await session.token_ids() == whole
    await fork.complete()
    await session.cancel()


async def test_a_fork_in_the_middle_of_a_turn_pauses_until_it_is_resumed(client):
    session = await client.sessions.create(tools=[NOTE], limits=LONG, sampling={"temperature": 1.0}, seed=1)
    await session.run("Note it.", tool_choice="required", max_tool_rounds=1)
    same, other = await session.fork(3), await session.fork(3, seed=99, resume=True)
    assert (await same.info()).state == "paused"
    await same.resume()
    for one in (same, other):
        await one.until("idle")
    assert await same.token_ids() == await session.token_ids()
    assert await other.token_ids() != await session.token_ids()
    for one in (session, same, other):
        await one.cancel()


@pytest.mark.parametrize("policy", ["drop_tool_output", pytest.param("summarise", marks=pytest.mark.soak)])
async def test_a_context_that_fills_up_is_compacted_and_the_compaction_can_be_rewound(client, policy):
    big = {**NOTE, "name": "big", "command": ["sh", "-c", "yes tide and ferry and harbour | head -c 15000"]}
    session = await client.sessions.create(tools=[big], limits={"max_think_tokens": 60}, context_policy=policy)
    await session.send("Look.", tool_choice="required", max_tool_rounds=3)
    await session.until("idle")
    events = await session.events()
    assert "context.warning" in [event.type for event in events]
    compacted = [event for event in events if event.type == "context.compacted"]
    assert compacted
    assert compacted[0].data["to"] < compacted[0].data["from"]
    step = compacted[0].step
    after = next(one for one in await session.steps() if one["id"] == step + 1)
    kept, size = compacted[0].data["kept"], compacted[0].data["to"]
    if policy == "drop_tool_output":
        computed = after["output"]["kv"]["computed"] + after["output"]["kv"]["recomputed"]
        assert computed <= size - kept + 64, "what stands before the first output that was dropped keeps its KV"
    info = await session.info()
    assert info.tokens < 8192
    before = next(c for c in await session.checkpoints() if c["id"] == step - 1)
    await session.rewind(step - 1)
    assert len(await session.token_ids()) == before["tokens"]
    await session.cancel()


async def test_a_tool_that_runs_at_the_caller_waits_for_its_result(client, stack):
    mine = {"type": "client", **{key: NOTE[key] for key in ("name", "description", "parameters")}}
    session = await client.sessions.create(tools=[mine], limits=LONG)
    await session.send("Note it.", tool_choice="required", max_tool_rounds=2)
    await session.until("waiting")
    [question] = await session.questions()
    assert (question.kind, question.about["name"]) == ("client_tool", "note")
    old = stack.kill("node")
    await stack.restarted("node", old)
    after = await session.position()
    await client.answer(question.id, "result", output="noted at the caller's")
    await seen(session, "session.waiting", after)
    [question] = await session.questions()
    await client.answer(question.id, "result", output="no paper", is_error=True)
    await session.until("idle")
    settled = [event.data for event in await session.events() if event.type == "tool.settled"]
    assert [(one["reason"], one["preview"]) for one in settled] == [
        ("exit", "noted at the caller's"),
        ("error", "no paper"),
    ]
    await session.cancel()


async def test_a_session_can_be_a_tool_and_what_dies_meanwhile_makes_no_second_one(client, stack):
    clerk = {"type": "session", "name": "clerk", "description": "Somebody who can note things.", "tools": [NOTE]}
    clerk |= {"tool_choice": "required", "max_tool_rounds": 1, "system": "Note what you are told."}
    session = await client.sessions.create(tools=[clerk], limits={"max_think_tokens": 80})
    await session.send("Let it be noted.", tool_choice="required", max_tool_rounds=1)
    await seen(session, "tool.started")
    old = stack.kill("node")
    await stack.restarted("node", old)
    await session.until("idle")
    settled = [event.data for event in await session.events() if event.type == "tool.settled"]
    assert [one["reason"] for one in settled] == ["exit"]
    child = await client.sessions.get(settled[0]["session"])
    created = (await child.events())[0]
    assert created.data["parent"] == session.id
    assert (await child.until("completed")).state == "completed"
    assert [event.type for event in await child.events()].count("tool.settled") == 1
    await session.cancel()


async def test_cancelling_a_session_cancels_the_one_that_is_its_tool(client):
    clerk = {"type": "session", "name": "clerk", "description": "Somebody who can wait.", "tools": [SLOW]}
    clerk |= {"tool_choice": "required", "max_tool_rounds": 1}
    session = await client.sessions.create(tools=[clerk], limits={"max_think_tokens": 80})
    await session.send("Let it be done.", tool_choice="required", max_tool_rounds=1)
    await seen(session, "tool.started")
    children = []
    while not children:
        children = [one async for one in client.sessions.list() if getattr(one, "parent", None) == session.id]
    child = await client.sessions.get(children[0].id)
    await seen(child, "tool.started")
    await session.cancel()
    assert (await child.until("cancelled")).state == "cancelled"


@pytest.mark.soak
async def test_a_context_in_which_nothing_can_give_way_fails_in_a_sentence_and_not_for_ever(client):
    session = await client.sessions.create(limits={"max_think_tokens": 8}, context_policy="drop_tool_output")
    await session.run("tide " * 7600)
    with pytest.raises(tenuto.SessionFailed, match="the model's context holds 8192; send less"):
        await session.run("ferry " * 600)
    types = [event.type for event in await session.events()]
    assert types.count("session.failed") == 1
    assert types.count("context.compacted") == 1
    await session.cancel()


async def test_verbs_that_make_no_sense_are_refused_in_a_sentence(client, stack):
    session = await client.sessions.create()
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    async with httpx.AsyncClient(base_url=f"{stack.api_url}/v1/sessions/{session.id}", headers=headers) as http:
        for verb, body, status, words in (
            ("resume", {}, 409, "only a paused session"),
            ("retry", {}, 409, "only a failed session"),
            ("rewind", {"step": 1}, 409, "once it has a checkpoint"),
            ("rewind", {"step": 0}, 400, "step"),
            ("rewind", {}, 400, "step"),
            ("fork", {"step": 7}, 400, "no checkpoint at step 7"),
            ("complete", {}, 409, "only one at rest"),
        ):
            answer = await http.post(f"/{verb}", json=body)
            assert (answer.status_code, words in answer.json()["detail"]) == (status, True), (verb, answer.text)
    await session.cancel()
    with pytest.raises(tenuto.APIError, match="cancelled"):
        await session.pause()


async def test_what_a_killed_worker_was_told_is_done_by_the_next_one(client, stack):
    session = await client.sessions.create(**TELLING)
    await session.send(STORY)
    await seen(session, "model.delta")
    old = stack.kill("worker")
    await session.pause(wait=False)
    await stack.restarted("worker", old)
    await session.until("paused")
    await session.cancel()


async def test_the_log_of_all_this_has_no_gap(client):
    async for info in client.sessions.list():
        session = await client.sessions.get(info.id)
        ids = [event.id for event in await session.events()]
        assert ids == list(range(1, len(ids) + 1))
        assert json.dumps(info.model_dump(mode="json"))
        await asyncio.sleep(0)
