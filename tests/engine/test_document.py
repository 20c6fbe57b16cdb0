"""Tokenizers of Hugging Face directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.tokens import Tokenizer
from engine.tokens.document import tokenizer_of
from tests.engine.tiny_hf import VOCAB, tokenizer_document

TEXTS = [
    "hello world",
    "  two  spaces\n\n",
    "é 東京 \U0001f600",
    "a\tb",
    "<|im_end|>",
    "\u2581 \u2581",
    "<0x41>",
    "<unk>",
]


def byte_level() -> dict[str, Any]:
    return tokenizer_document()


def sentencepiece() -> dict[str, Any]:
    """As llama 2 and the first mistrals are written: a space put before the text, and bytes to fall back on."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["\u2581", "h", "e", "l", "o", "he", "ll", "llo", "\u2581he"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": n, "content": text, "special": True, **plain} for n, text in enumerate(texts[:3])]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, spaces]},
        "pre_tokenizer": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: n for n, text in enumerate(texts)},
            "merges": ["h e", "l l", "ll o", "\u2581 he"],
        },
    }


def metaspaced() -> dict[str, Any]:
    """The same, as transformers writes it since its version 4.40."""
    splitter = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    return {**sentencepiece(), "normalizer": None, "pre_tokenizer": splitter}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspaced": metaspaced,
}


LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
BROKEN = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}


def opened(document: dict[str, Any], end: str = "", ends: tuple[Any, ...] = (2,)) -> Tokenizer:
    return tokenizer_of(Path("/models/m"), document, end, list(ends), VOCAB)


TOKENIZERS = {name: opened(kind()) for name, kind in KINDS.items()}


@pytest.mark.parametrize("name", KINDS)
@given(st.text())
def test_any_text_comes_back_as_it_went(name: str, text: str) -> None:
    written = text.encode(errors="surrogatepass").decode(errors="replace")
    assert TOKENIZERS[name].decode(TOKENIZERS[name].encode(text)) == written


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_what_a_user_writes_is_never_a_control_token(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not any(tokenizer.is_control(token) for token in ids)
    for control in tokenizer.control_texts():
        assert [tokenizer.is_control(token) for token in tokenizer.encode(control, allow_special=True)] == [True]


def test_bytes_are_cut_as_the_library_itself_cuts_them() -> None:
    from tokenizers import Tokenizer as Reference

    reference = Reference.from_str(json.dumps(byte_level()))
    for text in ("hello world 12", "hello  hello\n", "wor worst"):
        wanted = reference.encode(text, add_special_tokens=False).ids
        assert TOKENIZERS["byte-level"].encode(text) == TOKENIZERS["byte-level"].encode(text, True) == wanted


def test_sentencepieces_tokens_are_the_librarys_where_the_text_begins_with_a_space() -> None:
    from tokenizers import Tokenizer as Reference

    reference = Reference.from_str(json.dumps(sentencepiece()))
    for name in ("sentencepiece", "metaspaced"):
        assert TOKENIZERS[name].encode(" hello é") == reference.encode("hello é", add_special_tokens=False).ids


def test_a_mark_that_stands_for_a_space_is_spelt_out_in_bytes() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    assert tokenizer.encode("\u2581") == [3 + byte for byte in "\u2581".encode()]
    assert tokenizer.encode(" ") != tokenizer.encode("\u2581")


def test_a_merge_into_a_control_token_is_not_made_from_text() -> None:
    document = byte_level()
    document["model"]["vocab"] |= {"<h": 280, "<he": 281}
    document["model"]["merges"] = [["<", "h"], ["<h", "e"], *document["model"]["merges"]]
    document["added_tokens"].append({**document["added_tokens"][0], "id": 281, "content": "<he"})
    tokenizer = opened(document)
    assert tokenizer.is_control(281)
    assert 281 not in tokenizer.encode("<he <hello")
    assert tokenizer.decode(tokenizer.encode("<he <hello")) == "<he <hello"


def test_the_token_that_ends_a_message_comes_first_and_all_that_end_one_follow() -> None:
    assert opened(byte_level(), "<|im_end|>", ([0, 2], None)).eos_token_ids == (2, 0)
    assert opened(byte_level(), "", (None, 1)).eos_token_ids == (1,)


def test_rows_without_a_token_are_of_no_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert tokenizer.vocab_size == VOCAB
    assert tokenizer.decode([VOCAB - 1]) == ""


def test_the_digest_is_of_what_the_tokens_depend_on() -> None:
    same, other = byte_level(), byte_level()
    other["model"]["merges"] = other["model"]["merges"][:-1]
    marks = {opened(byte_level()).digest, opened(same).digest}
    assert len(marks) == 1
    assert len(marks | {opened(other).digest, opened(same, "<|im_start|>").digest}) == 3


def changed(*path: str, to: Any, kind: Callable[[], dict[str, Any]] = byte_level) -> dict[str, Any]:
    document = kind()
    inside = document
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = to
    return document


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({}, "it is a None tokenizer; byte-pair encoding"),
        (changed("model", "type", to="Unigram"), "it is a 'Unigram' tokenizer"),
        (changed("model", "vocab", to=["a"]), "not one of ids below the model's 288"),
        (changed("model", "vocab", to={"a": 288}), "not one of ids below the model's 288"),
        (changed("model", "vocab", to={"a": 7, "b": 7}), "two of its tokens have one id"),
        (changed("model", "merges", to=None), "is no list"),
        (changed("model", "merges", to=["a b c"]), "is no merge of two tokens"),
        (changed("model", "merges", to=[["a", "nowhere"]]), "it cannot be used: "),
        (changed("model", "end_of_word_suffix", to="</w>"), "marked at the edges of words"),
        (changed("added_tokens", to=[{"id": 7, "content": "x"}]), "two of its tokens have one id"),
        (changed("added_tokens", to={}), "its added tokens are no list"),
        (changed("added_tokens", to=[{"id": 300, "content": "x"}]), "the added token 'x' has the id 300"),
        (changed("pre_tokenizer", to={"type": "Whitespace"}), "it splits text by 'Whitespace'"),
        (changed("pre_tokenizer", to={"type": "Sequence"}), "is no list"),
        (changed("pre_tokenizer", to=None), "neither bytes as its alphabet nor a token for every byte"),
        (changed("pre_tokenizer", "pretokenizers", to=[LEVEL, LEVEL]), "does not give a text back as it was"),
        (changed("pre_tokenizer", "pretokenizers", to=[BROKEN, LEVEL]), "it cannot be used: "),
        (changed("normalizer", to={"type": "Lowercase"}, kind=sentencepiece), "it normalises text by 'Lowercase'"),
        (changed("model", "byte_fallback", to=False, kind=sentencepiece), "nor a token for every byte"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_a_sentence(document: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelFileError, match=told) as error:
        opened(document)
    assert "/models/m/tokenizer.json" in str(error.value)


@pytest.mark.parametrize("ends", [(), (None,), (288,), ("x",), ([1, -1],), ({"a": 1},)])
def test_end_tokens_outside_the_vocabulary_are_a_sentence(ends: tuple[Any, ...]) -> None:
    with pytest.raises(ModelFileError, match="end tokens are"):
        opened(byte_level(), "", ends)
