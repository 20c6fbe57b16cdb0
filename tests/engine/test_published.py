"""A chat format that was published is the one that its owner has."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

from engine.errors import ModelFileError
from engine.tokens import PublishedChat, ToolSpec, load_chat_format, publish_chat, read_chat

TEXTS = ["", "plain", "  two  spaces\n\n\ttab", "héllo 東京 \U0001f600", "<|im_end|> is only text", "\ud800"]
TOOL = ToolSpec("run", "Runs.", {"type": "object", "properties": {"x": {"type": "integer"}}})


@pytest.fixture(scope="module")
def loaded(model_path):
    return load_chat_format(model_path)


@pytest.fixture(scope="module")
def published(loaded) -> PublishedChat:
    return publish_chat(*loaded)


def test_it_writes_the_same_tokens_and_reads_the_same_text(loaded, published):
    (tokenizer, chat), (tokenizer_2, chat_2) = loaded, read_chat(published)
    for text in TEXTS:
        assert tokenizer_2.encode(text, allow_special=True) == tokenizer.encode(text, allow_special=True)
        assert chat_2.user(text) == chat.user(text)
        assert chat_2.opening(text, [TOOL]) == chat.opening(text, [TOOL])
        assert tokenizer_2.decode(chat.user(text), show_control=True) == tokenizer.decode(chat.user(text), True)
    assert (tokenizer_2.eos_token_ids, tokenizer_2.digest) == (tokenizer.eos_token_ids, tokenizer.digest)


def test_what_is_published_again_has_the_same_name(published):
    assert publish_chat(*read_chat(published)) == published


def test_what_is_not_what_its_name_says_is_refused(published):
    raw = zlib.decompress(published.data)
    for damaged in (
        published.data[:-100],
        b"\0" + published.data,
        zlib.compress(raw[:-1] + b" "),
    ):
        with pytest.raises(ModelFileError, match=r"damaged|cut short"):
            read_chat(replace(published, data=damaged))
