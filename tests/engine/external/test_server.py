"""The engine in front of a scripted server, spoken to as a node does."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import Done, EngineError, Prefill, RequestError, Sampling, ServerUnavailable, Tokens
from engine.external.remote import Timeouts
from engine.tokens import ToolSpec, byte_chat
from engine.tokens.grammar import Form
from tests.engine.external.scripted import DONE, HEAD, HELLO, MODELS, engine_for, event, refusal, says, scripted

TOKENIZER, CHAT = byte_chat()
SPEC = ToolSpec("look", "Looks.")
PROMPT = [*CHAT.opening("Be brief.", [SPEC]), *CHAT.user("Hi"), *CHAT.assistant_open()]
BRIEF = Timeouts(0.2, 0.2, 0.2)


async def ask(client, **more):
    """Text, the last event, and all events."""
    told = []
    asked = {"request_id": "r", "session": "s", "token_ids": PROMPT, "max_tokens": 9, **more}
    async for one in client.generate(**asked):
        told.append(one)
    tokens = [token for one in told if isinstance(one, Tokens) for token in one.ids]
    return TOKENIZER.decode(tokens), told[-1], told


async def test_a_generation_is_one_request_and_its_answer_comes_as_tokens():
    async with scripted() as script, engine_for(script.url, key="k1") as client:
        text, done, told = await ask(client, sampling=Sampling(0.5, 3, 0.9, 1 << 40, min_p=0.1), stop=["END"])
        assert text == "hello"
        assert isinstance(told[0], Prefill)
        assert (done.finish_reason, done.kv_tokens, list(done.kv_keys), done.replayable) == ("stop", 0, [], False)
        assert done.usage == {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 3}
        (body,) = script.asked
        assert [one["role"] for one in body["messages"]] == ["system", "user"]
        assert body["tools"][0]["function"]["name"] == "look"
        wanted = {"model": "m", "stream": True, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 3}
        wanted |= {"min_p": 0.1, "seed": (1 << 40) % (1 << 31), "stop": ["END"]}
        assert {name: body[name] for name in wanted} == wanted
        assert all("authorization: bearer k1" in head.lower() for head in script.headers)
        assert "k1" not in repr(client.card)


async def test_what_is_asked_of_the_answer_goes_along():
    grammar = CHAT.tool_grammar([SPEC], {"name": "look"}, Form.json({"type": "object", "properties": {}}), False)
    async with scripted() as script, engine_for(script.url) as client:
        await ask(client, grammar=grammar)
        (body,) = script.asked
        assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
        assert body["parallel_tool_calls"] is False
        assert body["response_format"]["json_schema"]["schema"] == {"type": "object", "properties": {}}


async def test_tenants_are_kept_apart_in_the_servers_cache_where_it_can():
    async with scripted() as script, engine_for(script.url) as client:
        for salt in (b"a" * 32, b"b" * 32, b"a" * 32):
            await ask(client, salt=salt)
        first, second, third = [body["cache_salt"] for body in script.asked]
        assert first == third != second
        assert (b"a" * 32).hex() not in json.dumps(script.asked)


async def test_a_message_that_was_begun_is_gone_on_with_where_the_server_can():
    begun = TOKENIZER.encode("Once")
    async with scripted([HEAD + says("Once upon") + says("", "stop") + DONE]) as script:
        async with engine_for(script.url, kind="vllm") as client:
            text, _, _ = await ask(client, token_ids=PROMPT + begun, replay=len(begun))
            assert text == " upon"
            assert script.asked[0]["messages"][-1] == {"role": "assistant", "content": "Once"}
            assert (script.asked[0]["continue_final_message"], script.asked[0]["add_generation_prompt"]) == (
                True,
                False,
            )
        async with engine_for(script.url, kind="plain") as client:
            assert not client.card.continues
            with pytest.raises(RequestError, match="begin anew"):
                await ask(client, token_ids=PROMPT + begun, replay=len(begun))


async def test_an_option_that_the_server_does_not_know_is_refused_by_name():
    async with scripted() as script, engine_for(script.url, kind="plain") as client:
        assert "top_k" in client.card.refuses
        with pytest.raises(RequestError, match=r"sampling\.top_k"):
            await ask(client, sampling=Sampling(top_k=3))
        assert script.asked == []


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (refusal(401, "Incorrect key: k1"), RequestError, "TENUTO_OPENAI_KEY"),
        (refusal(400, "max context length is 8"), RequestError, "max context length is 8"),
        (refusal(429, "busy", "Retry-After: 3\r\n"), ServerUnavailable, "busy"),
        (refusal(503, "loading"), ServerUnavailable, "loading"),
        (b"", ServerUnavailable, "disconnected"),
        (b"nonsense\r\n\r\n", ServerUnavailable, "http"),
        (HEAD, ServerUnavailable, "ended before"),
        (HEAD + says("hel"), ServerUnavailable, "ended before"),
        (HEAD + says("hel") + b'data: {"choi', RequestError, "no JSON"),
        (HEAD + DONE, ServerUnavailable, "ended before"),
        (HEAD + b"data: nonsense\n\n", RequestError, "no JSON"),
        (HEAD + event(error={"message": "oom", "code": 500}), ServerUnavailable, "oom"),
        (HEAD.replace(b"text/event-stream", b"application/json") + b"{}", RequestError, "where a stream"),
        (HELLO.replace(b"Connection: close", b"Transfer-Encoding: chunked") + b"zz", ServerUnavailable, ""),
    ],
)
async def test_each_way_to_fail_is_told_as_what_it_is_and_tried_once(answer, kind, words):
    async with scripted([answer]) as script, engine_for(script.url, key="k1") as client:
        with pytest.raises(kind) as failed:
            await ask(client)
        assert words in str(failed.value).lower() or words in str(failed.value)
        assert "k1" not in str(failed.value)
        assert len(script.asked) == 1
        if b"Retry-After" in answer:
            assert failed.value.retry_after_s == 3
        text, _, _ = await ask(client) if answer is HELLO else ("", None, None)
        assert text == ""


@pytest.mark.parametrize("answer", [[None], [HEAD, None], [HEAD + says("hel"), None]])
async def test_a_server_that_falls_silent_is_given_up(answer):
    async with scripted(answer) as script, engine_for(script.url, timeouts=BRIEF) as client:
        with pytest.raises(ServerUnavailable, match="too long"):
            await ask(client)
        await script.left.wait()


async def test_a_cancel_ends_the_request_at_the_server():
    async with scripted([HEAD + says("hel"), None]) as script, engine_for(script.url) as client:
        generation = client.generate(request_id="r", session="s", token_ids=PROMPT)
        while not isinstance(await anext(generation), Tokens):
            pass
        assert await client.cancel("r")
        done = await anext(generation)
        assert isinstance(done, Done)
        assert done.finish_reason == "cancelled"
        await script.left.wait()
        assert not await client.cancel("r")


async def test_a_node_that_goes_ends_its_requests():
    async with scripted([HEAD + says("hel"), None]) as script, engine_for(script.url) as client:
        generation = client.generate(request_id="r", session="s", token_ids=PROMPT)
        await anext(generation)
        await client.abort()
        await script.left.wait()


async def test_a_newer_epoch_ends_what_an_older_one_began():
    async with scripted([HEAD + says("hel"), None], [HELLO]) as script, engine_for(script.url) as client:
        old = client.generate(request_id="r1", session="s", epoch=1, token_ids=PROMPT)
        await anext(old)
        text, _, _ = await ask(client, request_id="r2", epoch=2)
        assert text == "hello"
        await script.left.wait()
        with pytest.raises(RequestError, match="epoch"):
            await ask(client, request_id="r3", epoch=1)
        with pytest.raises(RequestError, match="epoch"):
            await client.kv("drop", session="s", epoch=1)


async def test_intents_about_kv_are_answered_as_external():
    async with scripted() as script, engine_for(script.url) as client:
        for intent in ("pin", "offload", "prefetch", "release", "drop"):
            receipt = await client.kv(intent, session="s", token_ids=PROMPT)
            assert (receipt.status, receipt.pages) == ("external", 0)
        assert (await client.kv_state("s")).keys == ()
        assert (await client.delete_keys(["0" * 64])).pages == 0
        assert (await client.audit())["integrity"] == "ok"
        await client.learn([b"x" * 32])
        assert await client.decisions() == (0, [])
        envelope = {
            "protocol_version": "1.0",
            "message_id": "m",
            "actions": [{"action_id": "a", "action_type": "kv_prefetch", "action_version": "1", "payload": {}}],
        }
        assert len(await client.kv_hints(envelope)) == 1


async def test_figures_have_the_fields_of_an_engine_that_has_pages():
    async with scripted() as script, engine_for(script.url) as client:
        await ask(client)
        stats = await client.stats()
        assert stats["counters"]["prefix_hit_tokens"] == 4
        assert stats["metrics"]["first_token_s"]["count"] == 1
        assert stats["external"] == {"requests": 1, "refused": 0, "lost": 0}
        assert (await client.spans())["memory"] is None


@pytest.mark.parametrize(
    ("entry", "how", "kind", "context"),
    [
        ({"owned_by": "vllm", "max_model_len": 99}, {}, "vllm", 99),
        ({"owned_by": "sglang", "max_model_len": 98}, {}, "sglang", 98),
        ({"owned_by": "llamacpp", "meta": {"n_ctx_train": 97}}, {}, "llamacpp", 97),
        ({"owned_by": "tenuto", "context_length": 96}, {}, "tenuto", 96),
        ({"owned_by": "somebody"}, {"context": 95}, "plain", 95),
        ({"max_model_len": 94}, {"kind": "openai", "context": 90}, "openai", 90),
    ],
)
async def test_the_kind_of_a_server_and_its_context_are_what_it_says(entry, how, kind, context):
    models = {"data": [{"id": "m", **entry}]}
    async with scripted(models=models) as script, engine_for(script.url, **how) as client:
        card = client.card
        assert (card.server, card.context_length, card.model, card.kv, card.exact) == (
            kind,
            context,
            "m",
            "external",
            False,
        )


@pytest.mark.parametrize(
    ("models", "how", "words"),
    [
        ({"data": [{"id": "m"}]}, {}, "TENUTO_OPENAI_CONTEXT"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, {}, "serves a, b; choose one"),
        (MODELS, {"model": "x"}, "does not serve 'x'; it serves m"),
        ({"data": []}, {}, "no model"),
        ([], {}, "right address"),
        ({"data": [7, {"id": 7}]}, {}, "no model"),
    ],
)
async def test_what_somebody_must_say_is_asked_for(models, how, words):
    async with scripted(models=models) as script:
        with pytest.raises(RequestError, match=words):
            async with engine_for(script.url, **how):
                pass


WHOLE = HELLO.removeprefix(HEAD)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    at=st.integers(0, len(WHOLE)),
    cut=st.booleans(),
    junk=st.sampled_from(
        [b"", b"\r", b"\n\n", b": x\n", b"data: {\n\n", b"data: []\n\n", b"\xff\xfe", b"data: null\n\n"]
    ),
)
def test_a_stream_that_is_cut_or_soiled_anywhere_ends_in_its_text_or_in_a_name(at, cut, junk):
    async def run():
        answer = WHOLE[:at] + junk + (b"" if cut else WHOLE[at:])
        async with scripted([HEAD + answer]) as script, engine_for(script.url) as client:
            with contextlib.suppress(EngineError):
                text, done, _ = await ask(client)
                assert (done.finish_reason, text == "hello" or junk) in (("stop", True), ("stop", junk))

    asyncio.run(run())
