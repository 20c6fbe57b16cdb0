"""A session that thinks, and whose workspace and pages are somebody else's concern in between."""

from __future__ import annotations

import asyncio
import signal

import pytest

from runtime.store import sessions

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sandbox]

WAIT = {
    "name": "wait",
    "description": "Wait.",
    "parameters": {"type": "object", "properties": {"word": {"enum": ["a"]}}, "required": ["word"]},
    "command": ["cat", "/work/word"],
}


async def told(house, session: str, content: str, **more) -> None:
    answer = await house.client.post(f"/v1/sessions/{session}/events", json={"content": content, **more})
    assert answer.status_code == 202, answer.text


async def until(house, session: str, *states: str) -> dict:
    while True:
        with house.app.state.hub.following(session) as (_, reader):
            info = (await house.client.get(f"/v1/sessions/{session}")).json()
            if info["state"] in states:
                return info
            await asyncio.wait_for(reader.woken.wait(), 30)


async def tokens(house, session: str) -> list[int]:
    found = (await house.client.get(f"/v1/sessions/{session}/transcript")).json()["data"]
    return [token for one in found for token in one["token_ids"]]


async def put(house, session: str, path: str = "word", data: bytes = b"from outside") -> dict:
    answer = await house.client.put(f"/v1/sessions/{session}/sandbox/files/{path}", content=data)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def turn(house, session: str, content: str, **more) -> None:
    """A whole one, from its message to rest."""
    before = (await house.client.get(f"/v1/sessions/{session}")).json()["last_event"]
    await told(house, session, content, **more)
    while "session.idle" not in [one["type"] for one in await since(house, session, before)]:
        await asyncio.sleep(0.02)


async def since(house, session: str, after: int = 0) -> list[dict]:
    found = await house.client.get(f"/v1/sessions/{session}/events", params={"after": after, "limit": 1000})
    return found.json()["data"]


async def steps(house, session: str) -> list[tuple[str, str]]:
    found = await house.client.get(f"/v1/sessions/{session}/steps")
    return [(one["kind"], one["state"]) for one in found.json()["data"]]


async def command(house, session: str, verb: str, **body) -> None:
    answer = await house.client.post(f"/v1/sessions/{session}/{verb}", json=body)
    assert answer.status_code == 202, answer.text


async def thinking(house, session: str, content: str) -> None:
    """In the middle of a think, with tokens that are durable."""
    said = "SELECT 1 FROM events WHERE session_id = $1 AND type = 'model.delta' LIMIT 1"
    with house.app.state.hub.following(session) as (_, reader):
        await told(house, session, content)
        while not await house.db.fetch(said, session):
            reader.woken.clear()
            await asyncio.wait_for(reader.woken.wait(), 30)


async def paused_in_a_think(house, session: str, content: str) -> None:
    """With tokens that are durable, and more to come. The engine stands still until the word has reached the node."""
    await thinking(house, session, content)
    house.engine.child.send_signal(signal.SIGSTOP)
    try:
        await command(house, session, "pause")
        await until(house, session, "paused")
    finally:
        house.engine.child.send_signal(signal.SIGCONT)


TALK = {"limits": {"max_think_tokens": 8}, "sampling": {"temperature": 1.0}, "seed": 5}
LONG = {"limits": {"max_think_tokens": 3000}, "seed": 6}


async def test_a_change_between_turns_leaves_the_transcript_as_it_is(house):
    changed, plain = await house.session(**TALK), await house.session(**TALK)
    for session in (changed, plain):
        await turn(house, session, "hello")
        if session == changed:
            await put(house, session)
        await turn(house, session, "hello again")
    assert await tokens(house, changed) == await tokens(house, plain)
    assert [kind for kind, _ in await steps(house, changed)] == ["input", "think", "decision", "input", "think"]


async def test_a_think_that_was_paused_goes_on_behind_a_change_with_the_tokens_that_it_had(house):
    plain, changed = await house.session(**LONG), await house.session(**LONG)
    await turn(house, plain, "hello")
    await paused_in_a_think(house, changed, "hello")
    done = await put(house, changed)
    assert await steps(house, changed) == [
        ("input", "completed"),
        ("think", "cancelled"),
        ("decision", "completed"),
        ("think", "running"),
    ]
    assert (await house.client.get(f"/v1/sessions/{changed}")).json()["state"] == "paused"
    await command(house, changed, "resume")
    await until(house, changed, "idle")
    assert await tokens(house, changed) == await tokens(house, plain)
    retried = [one for one in await since(house, changed) if one["type"] == "step.retrying"]
    assert retried[-1]["data"]["keep"] > 0
    checkpoints = (await house.client.get(f"/v1/sessions/{changed}/checkpoints")).json()["data"]
    assert checkpoints[-1]["workspace_root"] == checkpoints[-2]["workspace_root"]
    assert checkpoints[-2]["id"] == done["step"]


async def test_a_failed_think_can_be_retried_behind_a_change(house):
    plain, changed = await house.session(**LONG), await house.session(**LONG)
    await turn(house, plain, "hello")
    await paused_in_a_think(house, changed, "hello")
    await sessions.fail(house.db, changed, "as if its engine could not")
    await put(house, changed)
    assert (await steps(house, changed))[-1] == ("think", "failed")
    await command(house, changed, "retry")
    await until(house, changed, "idle")
    assert await tokens(house, changed) == await tokens(house, plain)


async def test_a_call_that_waits_for_a_word_sees_what_was_put_meanwhile(house):
    session = await house.session(tools=[WAIT], approvals={"wait": {}}, limits={"max_think_tokens": 300}, seed=1)
    await told(house, session, "wait", tool_choice="required", max_tool_rounds=1)
    await until(house, session, "waiting")
    await put(house, session)
    (question,) = (await house.client.get("/v1/approvals", params={"session": session, "state": "open"})).json()["data"]
    assert question["step"] == 5
    await house.client.post(f"/v1/approvals/{question['id']}", json={"decision": "approve"})
    await until(house, session, "idle")
    (settled,) = [one for one in await since(house, session) if one["type"] == "tool.settled"]
    assert settled["data"]["preview"] == "from outside"
    kinds = [kind for kind, state in await steps(house, session) if state == "completed"]
    assert kinds == ["input", "think", "decision", "tool", "think"]


async def test_while_a_call_has_begun_the_workspace_is_its_own(house):
    ask = {**WAIT, "name": "ask", "type": "client"}
    del ask["command"]
    session = await house.session(tools=[ask], limits={"max_think_tokens": 300}, seed=1)
    await told(house, session, "wait", tool_choice="required", max_tool_rounds=1)
    await until(house, session, "waiting")
    await house.db.execute("UPDATE tool_calls SET runs = 1, sandbox_id = 'x' WHERE session_id = $1", session)
    answer = await house.client.put(f"/v1/sessions/{session}/sandbox/files/a", content=b"x")
    assert answer.status_code == 409
    assert "has begun" in answer.json()["detail"]


async def test_a_session_that_was_changed_ends_and_leaves_nothing(house):
    session = await house.session(**TALK)
    await turn(house, session, "hello")
    await put(house, session)
    await house.client.post(f"/v1/sessions/{session}/sandbox/exec", json={"command": "true"})
    await house.client.post(f"/v1/sessions/{session}/kv/pin", json={})
    await command(house, session, "cancel")
    await until(house, session, "cancelled")
    files = await house.client.get(f"/v1/sessions/{session}/sandbox/files")
    assert (files.status_code, "went with it" in files.json()["detail"]) == (409, True)
    assert (await house.client.post(f"/v1/sessions/{session}/kv/pin", json={})).json()["status"] == "missing"
    gone = [await house.client.put(f"/v1/sessions/{session}/sandbox/files/a", content=b"x")]
    gone += [await house.client.post(f"/v1/sessions/{session}/sandbox/exec", json={"command": "true"})]
    gone += [await house.client.get(f"/v1/sessions/{session}/export")]
    assert [one.status_code for one in gone] == [409, 409, 409]


async def test_a_command_that_runs_ends_with_its_session(house):
    session = await house.session()
    path = f"/v1/sessions/{session}/sandbox/exec"
    running = asyncio.create_task(house.client.post(path, json={"command": ["sleep", "60"]}))
    while "exec.started" not in [one["type"] for one in await since(house, session)]:
        await asyncio.sleep(0.02)
    await command(house, session, "cancel")
    answer = await running
    assert (answer.status_code, "has ended" in answer.json()["detail"]) == (409, True)
    await until(house, session, "cancelled")


async def test_a_rewind_takes_a_change_back_and_a_fork_keeps_it(house):
    session = await house.session(**TALK)
    await turn(house, session, "hello")
    step = (await put(house, session))["step"]
    fork = (await house.client.post(f"/v1/sessions/{session}/fork", json={})).json()["id"]
    await command(house, session, "rewind", step=step - 1)
    while "session.rewound" not in [one["type"] for one in await since(house, session)]:
        await asyncio.sleep(0.02)
    listed = [await house.client.get(f"/v1/sessions/{one}/sandbox/files") for one in (session, fork)]
    assert [[one["path"] for one in answer.json()["data"]] for answer in listed] == [[], ["word"]]
    await turn(house, fork, "hello again")


async def test_what_is_asked_for_at_the_same_time_is_done_one_after_the_other(house):
    session = await house.session(**TALK)
    asked = [put(house, session, f"file{n}", str(n).encode()) for n in range(6)]
    await told(house, session, "hello")
    done = await asyncio.gather(*asked, return_exceptions=True)
    made = [one["step"] for one in done if isinstance(one, dict)]
    assert len(made) == len(set(made))
    await until(house, session, "idle")
    listed = (await house.client.get(f"/v1/sessions/{session}/sandbox/files")).json()["data"]
    assert len(listed) == len(made)


async def test_intents_are_answered_by_receipts_and_written_down(house):
    session = await house.session(**TALK)
    kv = f"/v1/sessions/{session}/kv"
    assert (await house.client.post(f"{kv}/pin")).json()["status"] == "missing"
    await turn(house, session, "hello " * 20)
    receipts = [
        (await house.client.post(f"{kv}/{intent}", json=body)).json()
        for intent, body in (
            ("pin", {"ttl_s": 60}),
            ("release", {}),
            ("offload", {"tier": "host", "wait": True}),
            ("offload", {"tier": "nvme", "wait": True}),
            ("prefetch", {"wait": True}),
        )
    ]
    assert {one["status"] for one in receipts} <= {"accepted", "deferred", "rejected"}, receipts
    assert receipts[2]["tier"] == "host"
    assert all(one["epoch"] == 1 for one in receipts)
    client = await house.services.engine.client()
    _, decisions = await client.decisions()
    asked = [(one["action"], one["place"]) for one in decisions if one["session"] == session and one["reason"] == "api"]
    assert ("store", "host") in asked
    assert ("pin", "device") in asked
    wrong = await house.client.post(f"{kv}/pin", json={"tier": "host"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tier")
    assert (await house.client.post(f"{kv}/drop", json={})).status_code == 400
    assert (await house.other.post(f"{kv}/pin", json={})).status_code == 404


async def test_an_intent_with_a_key_is_answered_as_before(house):
    session = await house.session(**TALK)
    await turn(house, session, "hello")
    asked = [
        await house.client.post(f"/v1/sessions/{session}/kv/pin", json={}, headers={"Idempotency-Key": session})
        for _ in range(2)
    ]
    assert asked[0].json() == asked[1].json()


async def test_an_imported_session_goes_on_with_the_same_tokens(house):
    session = await house.session(**TALK)
    await turn(house, session, "hello")
    await put(house, session)
    archive = (await house.client.get(f"/v1/sessions/{session}/export")).content
    made = await house.client.post("/v1/sessions/import", content=archive)
    assert made.status_code == 201, made.text
    other = made.json()["id"]
    assert await tokens(house, other) == await tokens(house, session)
    for one in (session, other):
        await turn(house, one, "and on")
    assert await tokens(house, other) == await tokens(house, session)
    assert b"hello" in archive


async def test_a_session_that_is_exported_in_a_think_comes_in_paused_before_it(house):
    session = await house.session(**LONG)
    await thinking(house, session, "hello")
    archive = (await house.client.get(f"/v1/sessions/{session}/export")).content
    await until(house, session, "idle")
    made = (await house.client.post("/v1/sessions/import", content=archive)).json()
    assert made["state"] == "paused"
    await command(house, made["id"], "resume")
    await until(house, made["id"], "idle")
    assert await tokens(house, made["id"]) == await tokens(house, session)


async def test_an_operator_sees_engines_tiers_and_sandboxes(house):
    session = await house.session()
    await house.client.post(f"/v1/sessions/{session}/sandbox/exec", json={"command": "true"})
    (engine,) = (await house.client.get("/v1/admin/engines")).json()["data"]
    assert (engine["id"], engine["error"], engine["stats"]["integrity"]) == ("n", None, "ok")
    (kv,) = (await house.client.get("/v1/admin/kv")).json()["data"]
    assert kv["tiers"]["host"]["budget_bytes"] > 0
    boxes = (await house.client.get("/v1/admin/sandboxes", params={"limit": 1000})).json()["data"]
    assert session in [one["session_id"] for one in boxes]
    (audit,) = (await house.client.post("/v1/admin/kv/audit", json={})).json()["data"]
    assert (audit["clean"], audit["integrity"], audit["error"]) == (True, "ok", None)
    for path in ("engines", "kv", "sandboxes"):
        assert (await house.other.get(f"/v1/admin/{path}")).status_code == 403
    described = (await house.client.get(f"/v1/sessions/{session}/sandbox")).json()
    assert (described["state"], described["backend"], described["workspace"]) == (
        "live",
        "bubblewrap",
        {"files": 0, "bytes": 0},
    )
    assert [one["id"] for one in (await house.client.get(f"/v1/sessions/{session}/sandbox/snapshots")).json()["data"]]
