"""The engine in front of a real llama.cpp server."""

from __future__ import annotations

import pytest
import pytest_asyncio

from engine import RequestError, Sampling, ServerUnavailable
from engine.external.look import look
from engine.external.remote import Place, Remote
from engine.tokens import byte_chat
from tests.conftest import MODELS_DIR, TEST_MODEL
from tests.engine.external.scripted import engine_for
from tests.engine.external.test_server import ask
from tests.llama import KEY, llama

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

TOKENIZER, CHAT = byte_chat()
PROMPT = [*CHAT.user("Write a sentence about the sea."), *CHAT.assistant_open()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    async with llama(MODELS_DIR / f"{TEST_MODEL}.gguf", TEST_MODEL, context=1024) as running:
        yield running


async def test_it_is_known_by_what_it_says(server):
    async with engine_for(server.url, key=KEY) as client:
        card = client.card
        assert (card.model, card.server, card.context_length) == (TEST_MODEL, "llamacpp", 1024)


async def test_it_generates_and_counts(server):
    async with engine_for(server.url, key=KEY) as client:
        text, done, _ = await ask(client, token_ids=PROMPT, max_tokens=12)
        assert text
        assert (done.finish_reason, done.usage["completion_tokens"]) == ("length", 12)
        again, done, _ = await ask(client, token_ids=PROMPT, max_tokens=12)
        assert again == text
        assert done.usage["cached_tokens"] > 0
        assert "estimated" not in done.usage


async def test_it_takes_the_options_that_its_kind_says_it_takes(server):
    async with engine_for(server.url, key=KEY) as client:
        drawn = Sampling(0.7, 5, 0.9, 3, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5)
        text, done, _ = await ask(client, token_ids=PROMPT, max_tokens=8, sampling=drawn, stop=["zzz"])
        assert text
        assert done.finish_reason in ("stop", "length")


async def test_it_goes_on_after_what_was_said(server):
    begun = TOKENIZER.encode("The sea is")
    async with engine_for(server.url, key=KEY) as client:
        text, _, _ = await ask(client, token_ids=PROMPT + begun, replay=len(begun), max_tokens=8)
        assert text
        assert not text.startswith("The sea is")


async def test_what_it_refuses_is_told_in_its_words(server):
    async with engine_for(server.url, key=KEY) as client:
        with pytest.raises(RequestError) as refused:
            await ask(client, token_ids=[*CHAT.user("sea " * 2000), *CHAT.assistant_open()])
        assert refused.value.code == "context_length_exceeded"
        assert "1024" in str(refused.value)
    async with Remote(Place(server.url, "wrong")) as remote:
        with pytest.raises(RequestError, match="TENUTO_OPENAI_KEY"):
            await remote.get(f"{server.url.removesuffix('/v1')}/props")


async def test_one_that_was_killed_is_away_until_it_is_back(server):
    async with engine_for(server.url, key=KEY) as client:
        server.kill()
        await server.ended()
        with pytest.raises(ServerUnavailable):
            await ask(client, token_ids=PROMPT)
        async with Remote(Place(server.url, KEY)) as remote:
            with pytest.raises(ServerUnavailable):
                await look(remote)
        await server.start()
        assert (await ask(client, token_ids=PROMPT, max_tokens=4))[0]
