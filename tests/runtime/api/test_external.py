"""Sessions whose model a server elsewhere runs: a scripted one, so that it can be lost, refuse and call at will."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from engine.external.__main__ import card_of
from engine.external.look import look
from engine.external.remote import Place, Remote
from engine.external.server import ExternalServer
from engine.tokens import byte_chat, publish_chat
from runtime.engines import EngineLink
from runtime.node import serving
from runtime.steps.recent import Recent
from runtime.store import chats, fleet
from tests.console.conftest import Operator
from tests.engine.external.scripted import DONE, HEAD, PATIENT, Scripted, event, refusal, says, scripted, used
from tests.runtime.api.house import House, _beating
from tests.runtime.api.test_between_steps import command, since, told, turn, until
from workflows.contract import node_queue

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sandbox]

NOTE = {
    "name": "note",
    "description": "Write a note down.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    "command": ["sh", "-c", "echo mark >> /work/notes; wc -l < /work/notes"],
}
HELLO = [HEAD + says("hel") + says("lo", "stop") + used(20, 8, 2) + DONE]
HALF = [HEAD + says("hel")]


def models(name: str, owner: str, context: int = 4096) -> dict:
    return {"data": [{"id": name, "owned_by": owner, "context_length": context}]}


@contextlib.asynccontextmanager
async def beside(house: House, *answers, name="org/m", owner="tenuto", context=4096) -> AsyncIterator[Scripted]:
    """A second node of the house, in front of a scripted server."""
    async with contextlib.AsyncExitStack() as stack:
        script = await stack.enter_async_context(scripted(*answers, models=models(name, owner, context)))
        remote = await stack.enter_async_context(Remote(Place(script.url, "sk-hidden", PATIENT)))
        served = await look(remote)
        server = ExternalServer(card_of(served), remote, served)
        (address,) = await server.listen(None, ("127.0.0.1", 0))
        stack.push_async_callback(server.close)
        engine = await stack.enter_async_context(EngineLink(address))
        await engine.ready(timeout_s=10)
        tokenizer, chat = byte_chat()
        about = {"engine": engine, "tokenizer": tokenizer, "chat": chat, "recent": Recent()}
        node = replace(house.services, node_id="x", boot="b", **about)
        published = publish_chat(tokenizer, chat)
        await chats.publish(house.db, published.digest, published.data)
        at = ("x", "b", node_queue("x", "b"), engine.card.as_message(), {"backend": "bubblewrap"}, address)
        await fleet.register_node(house.db, *at, published.digest)
        await stack.enter_async_context(_beating(node))
        await stack.enter_async_context(serving(house.app.state.temporal, node))
        try:
            yield script
        finally:
            await house.db.execute("DELETE FROM nodes WHERE node_id = 'x'")


async def ended(house: House, session: str) -> dict:
    """Cancels it; returns what it was."""
    info = (await house.client.get(f"/v1/sessions/{session}")).json()
    await command(house, session, "cancel")
    await until(house, session, "cancelled")
    return info


def of_type(events: list[dict], kind: str) -> list[dict]:
    return [one["data"] for one in events if one["type"] == kind]


async def test_a_call_of_the_server_runs_here_and_its_result_goes_back(house):
    call = {"index": 0, "id": "x1", "function": {"name": "note", "arguments": '{"word": "tide"}'}}
    calls = [HEAD + says("So: ") + says(None, "tool_calls", tool_calls=[call]) + used(30, 0, 9) + DONE]
    async with beside(house, calls, HELLO) as script:
        session = await house.session(model="org/m", tools=[NOTE], system="Be brief.", seed=5)
        await turn(house, session, "Write it down.", tool_choice="required")
        events = await since(house, session)
        kv = (await house.client.get(f"/v1/sessions/{session}/kv")).json()
        pinned = (await house.client.post(f"/v1/sessions/{session}/kv/pin")).json()
        info = await ended(house, session)
    first, second = script.asked
    assert (first["tool_choice"], first["tools"][0]["function"]["name"], first["seed"]) == ("required", "note", 5)
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][2]["tool_calls"][0]["function"] == {"name": "note", "arguments": '{"word": "tide"}'}
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "call00001", "content": "1"}
    thinks = [one for one in of_type(events, "step.completed") if "usage" in one]
    assert [one["usage"]["completion_tokens"] for one in thinks] == [one["sampled"] for one in thinks] == [9, 2]
    assert [one["kv"] for one in thinks] == [{"external": 0, "computed": 30}, {"external": 8, "computed": 12}]
    assert [one["exact"] for one in thinks] == [False, False]
    assert (kv["tier"], kv["detail"], pinned["status"]) == ("external", {"server": "tenuto"}, "external")
    assert info["spent"]["tokens"] == 11
    assert not [one for one in events if one["type"].startswith("kv.")]


async def test_an_answer_that_was_cut_off_is_said_anew_where_the_server_cannot_go_on(house):
    async with beside(house, HALF, HELLO) as script:
        session = await house.session(model="org/m")
        await turn(house, session, "Hi")
        events = await since(house, session)
        info = await ended(house, session)
    (retried,) = of_type(events, "step.retrying")
    assert (retried["keep"], retried["dropped"]) == (0, 3)
    deltas = [(one["offset"], one["text"]) for one in of_type(events, "model.delta")]
    assert deltas[0] == (0, "hel")
    assert "".join(text for _, text in deltas[1:]) == "hello"
    assert of_type(events, "message.completed")[-1]["text"] == "hello"
    assert [one["messages"][-1]["role"] for one in script.asked] == ["user", "user"]
    assert info["spent"]["tokens"] == 3, "what was cut off counts as about a token"


async def test_an_answer_that_was_cut_off_goes_on_where_the_server_can(house):
    rest = [HEAD + says("lo", "stop") + used(20, 8, 1) + DONE]
    async with beside(house, HALF, rest, owner="vllm") as script:
        session = await house.session(model="org/m")
        await turn(house, session, "Hi")
        events = await since(house, session)
        await ended(house, session)
    assert [one["keep"] for one in of_type(events, "step.retrying")] == [3]
    assert "".join(one["text"] for one in of_type(events, "model.delta")) == "hello"
    assert script.asked[1]["messages"][-1] == {"role": "assistant", "content": "hel"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refusal(401, "no such key sk-hidden"), "no such key [key]; TENUTO_OPENAI_KEY"),
        (refusal(400, "maximum context length is 8 tokens"), "maximum context length is 8 tokens"),
        (HEAD + b"data: nonsense\n\n", "no JSON: 'nonsense'"),
        (HEAD + event(choices=[], error={"code": 422, "message": "bad tool"}), "bad tool"),
    ],
)
async def test_what_the_server_refuses_fails_the_session_in_its_words(house, answer, words):
    async with beside(house, [answer], HELLO) as script:
        session = await house.session(model="org/m")
        await told(house, session, "Hi")
        info = await until(house, session, "failed")
        assert words in info["error"]["message"]
        assert len(script.asked) == 1
        await command(house, session, "retry")
        await until(house, session, "idle")
        assert "sk-hidden" not in json.dumps(await since(house, session))
        await ended(house, session)


async def test_a_server_that_is_busy_is_asked_again_by_the_workflow_alone(house):
    async with beside(house, [refusal(429, "busy", "Retry-After: 0\r\n")], [refusal(503, "busy")], HELLO) as script:
        session = await house.session(model="org/m")
        await turn(house, session, "Hi")
        events = await since(house, session)
        await ended(house, session)
    assert len(script.asked) == 3
    assert [one["keep"] for one in of_type(events, "step.retrying")] == [0, 0]
    assert not any("dropped" in one for one in of_type(events, "step.retrying"))


async def test_what_was_said_before_an_interrupt_stays(house):
    async with beside(house, [HEAD + says("Once upon a time"), None], HELLO) as script:
        session = await house.session(model="org/m")
        await told(house, session, "Tell me.")
        with house.app.state.hub.following(session) as (_, reader):
            while "model.delta" not in await house.events(session):
                await reader.woken.wait()
                reader.woken.clear()
        await command(house, session, "interrupt")
        await script.left.wait()
        await until(house, session, "idle")
        await turn(house, session, "And now?")
        info = await ended(house, session)
    assert script.asked[1]["messages"][1] == {"role": "assistant", "content": "Once upon a time"}
    assert info["spent"]["tokens"] == 4 + 2


async def test_room_is_made_by_what_the_server_counts(house):
    full = [HEAD + says("lo", "stop") + used(230, 0, 10) + DONE]
    summary = [HEAD + says("In brief: hello.", "stop") + used(200, 0, 4) + DONE]
    async with beside(house, HELLO, full, summary, HELLO, context=256) as script:
        session = await house.session(model="org/m", context_policy="summarise", limits={"max_think_tokens": 16})
        await turn(house, session, "x" * 600)  # as bytes it would be too long already
        await turn(house, session, "Hi")
        await turn(house, session, "And?")
        events = await since(house, session)
        await ended(house, session)
    assert len(of_type(events, "context.compacted")) == 1
    assert "In brief: hello." in json.dumps(script.asked[-1]["messages"])
    assert script.asked[-1]["messages"][-1] == {"role": "user", "content": "And?"}


@pytest.mark.parametrize(
    ("option", "param"),
    [
        ({"sampling": {"logit_bias": {"5": 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"logprobs": 2}}, "sampling.logprobs"),
        ({"sampling": {"top_k": 3}}, "sampling.top_k"),
        ({"sampling": {"speculation": "off"}}, "sampling.speculation"),
        ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format"),
    ],
)
async def test_an_option_that_cannot_be_had_there_is_refused_by_its_name(house, option, param):
    async with beside(house):
        answer = await house.client.post("/v1/sessions", json={"model": "org/m", **option})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert answer.json()["error"]["code"] == "option_not_supported"
        assert param.rpartition(".")[2].split("_")[0] in answer.json()["error"]["message"]


async def test_a_model_may_have_a_slash_in_its_name_and_says_what_it_is(house):
    async with beside(house):
        found = (await house.client.get("/v1/models/org/m")).json()
        assert (found["id"], found["kv"], found["exact"], found["server"]) == ("org/m", "external", False, "tenuto")
        assert (await house.client.get("/v1/models/org/n")).status_code == 404


async def test_whoever_looks_at_such_a_node_sees_what_is_external(house):
    async with beside(house, HELLO):
        session = await house.session(model="org/m")
        await turn(house, session, "Hi")
        listed = (await house.client.get("/v1/admin/sessions", params={"tier": "external"})).json()["data"]
        assert [one["id"] for one in listed] == [session]
        reports = (await house.client.get("/v1/admin/doctor", params={"node": "x"})).json()["data"]
        assert {one["notes"][0].partition(":")[0] for one in reports} == {"external"}
        (engine,) = [one for one in (await house.client.get("/v1/admin/engines")).json()["data"] if one["id"] == "x"]
        assert (engine["card"]["kv"], engine["stats"]["external"]["requests"]) == ("external", 1)
        metrics = (await house.client.get("/v1/admin/metrics")).text
        assert 'tenuto_engine_seconds_count{node="x",name="first_token"} 1' in metrics
        transport = httpx.ASGITransport(house.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            operator = Operator(http)
            await operator.log_in()
            for path in ("/", "/kv", "/nodes", "/usage", "/sessions?tier=external"):
                await operator.page(path)
            assert "external" in await operator.page(f"/sessions/default/{session}")
        await ended(house, session)
