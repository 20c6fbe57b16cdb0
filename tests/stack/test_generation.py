"""How a session's answers are drawn, as its user sees it."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.stack, pytest.mark.model]

SEA = {
    "type": "object",
    "properties": {"sea": {"enum": ["calm", "rough"]}, "height": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["sea", "height"],
}


async def test_an_answer_has_the_form_that_its_session_says_or_is_incomplete(client):
    form = {"type": "json_schema", "json_schema": SEA}
    session = await client.sessions.create(response_format=form, sampling={"temperature": 1.0}, seed=3)
    turn = await session.run("How is the sea?")
    said = json.loads(turn.text)
    assert turn.outcome == "final"
    assert said["sea"] in ("calm", "rough")
    assert 0 <= said["height"] <= 9
    thinks = [step["output"] for step in await session.steps() if step["kind"] == "think"]
    assert thinks[0]["replayable"]
    assert thinks[0]["accepted"] <= thinks[0]["drafted"]
    await session.cancel()
    short = await client.sessions.create(response_format=form, limits={"max_think_tokens": 3}, seed=3)
    assert (await short.run("How is the sea?")).outcome == "incomplete"
    await short.cancel()


async def test_a_stop_text_ends_an_answer_and_is_not_shown(client):
    asked = {"system": "You are brief.", "limits": {"max_think_tokens": 24}, "seed": 4}
    free = await client.sessions.create(**asked)
    whole = (await free.run("Count from one to nine in words.")).text
    await free.cancel()
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    session = await client.sessions.create(**asked, sampling={"stop": [stop], "logprobs": 2})
    turn = await session.run("Count from one to nine in words.")
    assert turn.text == whole[: whole.index(stop)]
    assert turn.outcome == "final"
    deltas = [event.data for event in turn.events if event.type == "model.delta"]
    assert "".join(delta["text"] for delta in deltas) == turn.text
    for delta in deltas:
        assert len(delta["logprobs"]) == len(delta["token_ids"])
        for likely, token in zip(delta["logprobs"], delta["token_ids"], strict=True):
            assert likely["top"][0] == {"token_id": token, "logprob": likely["logprob"]}  # greedy
    think = next(step["output"] for step in await session.steps() if step["kind"] == "think")
    assert (think["stop_text"], think["finish_reason"]) == (stop, "stop")
    await session.cancel()
