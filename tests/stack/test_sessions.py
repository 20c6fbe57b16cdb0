"""Sessions through the SDK, against the whole stack."""

from __future__ import annotations

import asyncio

import pytest
import tenuto

from runtime.demo.run import left_in_stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.sandbox, pytest.mark.model]

ECHO = {
    "name": "echo",
    "description": "Say a word.",
    "parameters": {"type": "object", "properties": {"word": {"enum": ["tide"]}}, "required": ["word"]},
    "command": ["python3", "-c", "import json, sys; print(json.load(sys.stdin)['word'])"],
}


def sleeper(seconds: float) -> dict:
    return {**ECHO, "name": "wait", "command": ["sleep", str(seconds)]}


async def usage_of(client: tenuto.AsyncClient, session_id: str) -> dict:
    rows = (await client.get("/v1/usage", {"group_by": "session"}))["data"]
    return next(row for row in rows if row["id"] == session_id)


async def test_a_tool_call_runs_in_the_sandbox_and_its_result_reaches_the_model(client):
    session = await client.sessions.create(tools=[ECHO], limits={"max_think_tokens": 60}, seed=1)
    turn = await session.run("Say tide.", tool_choice="required", max_tool_rounds=1)
    assert [call["preview"] for call in turn.tool_calls] == ["tide\n"]
    kinds = [step["kind"] for step in await session.steps()]
    assert kinds == ["input", "think", "tool", "think"]
    checkpoints = await session.checkpoints()
    assert len(checkpoints) == 4
    assert checkpoints[-1]["tokens"] == len(await session.token_ids())
    used = await usage_of(client, session.id)
    thinks = [step["output"] for step in await session.steps() if step["kind"] == "think"]
    assert (used["steps"], used["unknown_steps"]) == (4, 0)
    assert used["sampled_tokens"] == sum(think["sampled"] for think in thinks)
    for source in ("device", "host", "nvme", "shared", "recomputed", "computed"):
        assert used[source] == sum(think["kv"][source] for think in thinks)
    assert min(used["engine_s"], used["sandbox_s"], used["tool_s"]) > 0
    await session.cancel()


async def test_a_second_message_computes_only_what_is_new(client):
    session = await client.sessions.create(system="tide " * 300, limits={"max_think_tokens": 8}, seed=2)
    await session.run("One.")
    await session.run("Two.")
    think = [step for step in await session.steps() if step["kind"] == "think"][-1]
    source = think["output"]["kv"]
    assert source["recomputed"] == 0
    assert source["device"] > 250
    assert source["computed"] < 40
    await session.cancel()


@pytest.mark.parametrize(
    ("policy", "place"), [("host", "host"), ("nvme", "nvme"), ("drop", "recomputed"), ("pin", "device")]
)
async def test_the_kv_policy_decides_where_the_next_think_finds_its_pages(client, policy, place):
    session = await client.sessions.create(
        system="tide " * 200 + policy,
        tools=[sleeper(1.0)],
        limits={"max_think_tokens": 60},
        kv={"on_tool": policy},
        seed=3,
    )
    turn = await session.run("Wait.", tool_choice="required", max_tool_rounds=1)
    last = [event for event in turn.events if event.type == "step.completed"][-1]
    source = last.data["kv"]
    kinds = {event.type for event in turn.events}
    if place in ("host", "nvme"):
        # Prefetched when the tool ended, or restored by the think itself: either way nothing was computed again.
        assert source["recomputed"] == 0
        moved = [event.data for event in turn.events if event.type == "kv.offloaded"]
        assert moved[-1]["tier"] == place
        assert (await usage_of(client, session.id))[f"{place}_byte_hours"] > 0
        assert {"kv.restored", "kv.prefetched"} & kinds
    elif place == "recomputed":
        assert source["recomputed"] > 150
        assert "kv.recomputed" in kinds
    else:
        assert source["device"] > 150
        assert "kv.pinned" in kinds
    await session.cancel()


async def test_cancel_in_a_tool_kills_it_and_frees_everything(client, stack):
    session = await client.sessions.create(tools=[sleeper(600)], limits={"max_think_tokens": 60}, seed=4)
    await session.send("Wait.", tool_choice="required", max_tool_rounds=1)
    async for event in session.stream():
        if event.type == "tool.started":
            break
    info = await session.cancel()
    assert info.state == "cancelled"
    assert await left_in_stack(stack) == []


async def test_cancel_in_a_think_stops_it(client, stack):
    session = await client.sessions.create(limits={"max_think_tokens": 4000}, sampling={"temperature": 1.5}, seed=5)
    await session.send("Write a very long story.")
    async for event in session.stream():
        if event.type == "model.delta":
            break
    assert (await session.cancel()).state == "cancelled"
    assert await left_in_stack(stack) == []


async def test_a_message_that_arrives_in_the_middle_of_a_turn_is_answered_after_it(client):
    session = await client.sessions.create(tools=[sleeper(1)], limits={"max_think_tokens": 60}, seed=6)
    first = await session.send("Wait.", tool_choice="required", max_tool_rounds=1)
    second = await session.send("And now?", tool_choice="none")
    turn = tenuto.TurnReader(second)
    async for event in session.stream():
        turn.feed(event)
        if turn.done:
            break
    taken = [event.data["message_id"] for event in turn.events if event.data.get("outcome") == "input"]
    assert taken == [first, second]
    await session.cancel()


async def test_sessions_at_the_same_time_do_not_change_each_others_tokens(client):
    async def one(seed: int) -> list[int]:
        session = await client.sessions.create(
            tools=[ECHO], limits={"max_think_tokens": 60}, sampling={"temperature": 0.8}, seed=seed
        )
        await session.run("Say tide.", tool_choice="required", max_tool_rounds=1)
        tokens = await session.token_ids()
        await session.cancel()
        return tokens

    alone = [await one(seed) for seed in (31, 32, 33)]
    together = await asyncio.gather(*(one(seed) for seed in (31, 32, 33)))
    assert together == alone


async def test_a_refused_call_is_told_to_the_model_and_the_session_goes_on(client):
    tool = {**ECHO, "command": ["no-such-command"]}
    session = await client.sessions.create(tools=[tool], limits={"max_think_tokens": 60}, seed=7)
    turn = await session.run("Say tide.", tool_choice="required", max_tool_rounds=1)
    assert turn.tool_calls[0]["reason"] in ("exit", "refused", "signal")
    assert turn.tool_calls[0]["code"] != 0
    await session.cancel()


async def test_a_tool_may_print_anything(client):
    binary = {**ECHO, "command": ["printf", r"a\000b\377"]}
    session = await client.sessions.create(tools=[binary], limits={"max_think_tokens": 60}, seed=8)
    turn = await session.run("Say tide.", tool_choice="required", max_tool_rounds=1)
    assert turn.tool_calls[0]["preview"] == "a\ufffdb\ufffd"
    await session.cancel()


async def test_a_result_larger_than_the_context_leaves_the_session_alive(client):
    loud = {**ECHO, "command": ["seq", "1", "60000"]}
    limits = {"max_think_tokens": 60, "tool_output_bytes": 262_144}
    session = await client.sessions.create(tools=[loud], limits=limits, seed=9)
    turn = await session.run("Say tide.", tool_choice="required", max_tool_rounds=1)
    assert turn.tool_calls[0]["stdout_bytes"] > 262_144
    assert turn.events[-1].type == "session.idle"
    await session.cancel()


async def test_snapshots_end_with_their_session(client, stack):
    fill = {**ECHO, "command": ["bash", "-c", "head -c 3000000 /dev/urandom > big; echo tide"]}
    session = await client.sessions.create(tools=[fill], limits={"max_think_tokens": 60}, seed=10)
    await session.run("Say tide.", tool_choice="required", max_tool_rounds=1)
    assert any("blob" in found for found in await left_in_stack(stack))
    await session.cancel()
    assert await left_in_stack(stack) == []


async def test_a_workspace_that_cannot_be_restored_fails_the_session_once(client):
    files = {f"{i}.txt": "" for i in range(2000)}
    session = await client.sessions.create(
        tools=[ECHO], files=files, limits={"max_think_tokens": 60, "workspace_bytes": 1 << 20}, seed=11
    )
    await session.send("Say tide.", tool_choice="required", max_tool_rounds=1)
    async for event in session.stream():
        if event.type in ("session.failed", "session.idle"):
            break
    assert (await session.info()).epoch < 5
    await session.cancel()
