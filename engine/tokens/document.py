"""Tokenizers from tokenizer.json: byte-level BPE, and BPE over SentencePiece's alphabet with bytes to fall back on.

Text is taken as it is, as in `Tokenizer`: a normaliser that composes code points and a space put before every text are
left out, and so are the tokens that a post-processor would add.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Bpe

from engine.errors import ModelFileError
from engine.tokens.vocabulary import (
    CONTROL,
    NORMAL,
    SPACE,
    UNUSED,
    USER_DEFINED,
    Tables,
    Tokenizer,
    token_bytes,
    unwritable,
)

_MAX_ADDED = 65_536
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_KEEPS_TEXT = ("Split", "Digits", "Punctuation", "ByteLevel", "Metaspace")
_SAMPLE = "".join(map(chr, range(0x20, 0x7F))) + " a  b\n\n\t\r\n é\u2581東京 \U0001f600 12345 "
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def tokenizer_of(path: Path, document: Mapping[str, Any], end: str, ends: list[Any], vocab: int) -> Tokenizer:
    """The tokenizer of the directory `path`, by its tokenizer.json; as many tokens as the model has rows of `vocab`.

    `end` is the text of the token that ends a message, "" where nothing names it; `ends` hold ids that end one too,
    each a number, a list, or None. Raises ModelFileError.
    """
    try:
        return _Document(document, vocab).tokenizer(end, ends)
    except ModelFileError as error:
        raise ModelFileError(f"{path / 'tokenizer.json'}: {error}") from error


class _Document:
    """A tokenizer.json, checked. Messages lack the file's name."""

    def __init__(self, document: Mapping[str, Any], vocab: int) -> None:
        model = document.get("model")
        if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
            kind = model.get("type") if isinstance(model, dict) else None
            raise ModelFileError(f"it is a {kind!r} tokenizer; byte-pair encoding ('BPE') is supported")
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise ModelFileError("its tokens are marked at the edges of words, which is not supported")
        self._model = {**model, "dropout": None, "unk_token": None}  # every byte has a token, or is not written
        self._merges = [_pair(merge) for merge in _list(model.get("merges"))]
        self._added = _added(document.get("added_tokens"), vocab)
        # Without a place in the vocabulary, `tokenizers` would give an added token the next id that is free.
        added = {entry["content"]: entry["id"] for entry in self._added}
        self._vocab = _vocab(model.get("vocab"), added, vocab)
        self._splitter = _splitter(document.get("pre_tokenizer"))
        self._is_byte_level = "ByteLevel" in _types(self._splitter)
        self._normalizer = None if self._is_byte_level else _normalizer(document.get("normalizer"), self._splitter)
        self._tokens, self._kinds = [""] * vocab, [UNUSED] * vocab
        for text, token in self._vocab.items():
            self._tokens[token], self._kinds[token] = text, NORMAL
        for entry in self._added:
            at = entry["id"]
            self._tokens[at], self._kinds[at] = entry["content"], CONTROL if entry["special"] else USER_DEFINED

    def tokenizer(self, end: str, ends: list[Any]) -> Tokenizer:
        plain, special = self._written([]), self._written(self._added)
        eos = self._eos(end, ends)
        named = json.dumps([plain, special, eos, len(self._tokens)], sort_keys=True)
        tables = Tables(
            tokens=self._tokens,
            kinds=self._kinds,
            pieces=[self._piece(text, kind) for text, kind in zip(self._tokens, self._kinds, strict=True)],
            plain=_built(plain),
            special=_built(special),
            eos=eos,
            unwritable=unwritable(self._vocab) if self._is_byte_level else None,
            space=None if self._is_byte_level else self._space(),
            digest=hashlib.sha256(named.encode()).hexdigest(),
        )
        tokenizer = Tokenizer(tables)
        if not _comes_back(tokenizer.decode(tokenizer.encode(_SAMPLE))):
            raise ModelFileError("it does not give a text back as it was")
        return tokenizer

    def _written(self, added: list[dict[str, Any]]) -> dict[str, Any]:
        """What `tokenizers` reads. Without added tokens, what is a control token cannot come from text at all."""
        control = set() if added else {token["content"] for token in self._added if token["special"]}
        model = self._model | {
            "vocab": {text: token for text, token in self._vocab.items() if text not in control},
            "merges": [pair for pair in self._merges if not control.intersection([*pair, "".join(pair)])],
        }
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": self._normalizer,
            "pre_tokenizer": self._splitter,
            "post_processor": None,
            "decoder": None,
            "model": model,
        }

    def _eos(self, end: str, ends: list[Any]) -> tuple[int, ...]:
        named = [at for at, text in enumerate(self._tokens) if end and text == end]
        listed = [token for given in ends for token in (given if isinstance(given, list) else [given])]
        eos = [*named, *(token for token in listed if token is not None)]
        if not eos or not all(_is_id(token, len(self._tokens)) for token in eos):
            raise ModelFileError(
                f"the model's end tokens are {eos}; at least one of a vocabulary of {len(self._tokens)} is needed"
            )
        return tuple(dict.fromkeys(eos))

    def _piece(self, text: str, kind: int) -> bytes:
        if self._is_byte_level or kind != NORMAL:
            return token_bytes(text, kind)
        byte = _BYTE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE, " ").encode()

    def _space(self) -> tuple[int, ...]:
        """The tokens that spell out the mark that stands for a space. Every byte must have one."""
        missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in self._vocab]
        if missing or not self._model.get("byte_fallback"):
            raise ModelFileError("it has neither bytes as its alphabet nor a token for every byte to fall back on")
        return tuple(self._vocab[f"<0x{byte:02X}>"] for byte in SPACE.encode())


def _comes_back(text: str) -> bool:
    """Whether it is the sample, but for what has no tokens."""
    pairs = zip(_SAMPLE, text, strict=False)
    return len(text) == len(_SAMPLE) and all(back in (sent, "\ufffd") for sent, back in pairs)


def _vocab(value: Any, added: dict[str, int], vocab: int) -> dict[str, int]:
    """Text -> id, the added tokens among them."""
    if not isinstance(value, dict) or not value or not all(_is_id(token, vocab) for token in value.values()):
        raise ModelFileError(f"its vocabulary is not one of ids below the model's {vocab}")
    whole = value | added
    if len(set(whole.values())) != len(whole):
        raise ModelFileError("two of its tokens have one id")
    return whole


def _added(value: Any, vocab: int) -> list[dict[str, Any]]:
    """Added tokens in the order of their ids, each as it stands: without the spaces beside it."""
    entries = [] if value is None else value
    if not isinstance(entries, list) or len(entries) > _MAX_ADDED:
        raise ModelFileError(f"its added tokens are no list of at most {_MAX_ADDED}")
    found: dict[int, dict[str, Any]] = {}
    for entry in entries:
        text = entry.get("content") if isinstance(entry, dict) else None
        token: Any = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text or not _is_id(token, vocab):
            raise ModelFileError(f"the added token {text!r} has the id {token!r}; one below {vocab} is needed")
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        found[token] = {"id": token, "content": text, "special": bool(entry.get("special")), **plain}
    return [found[token] for token in sorted(found)]


def _splitter(value: Any) -> Any:
    """The pre-tokenizer, if it keeps all of the text; without a space before it."""
    if isinstance(value, dict) and value.get("type") == "Sequence":
        return {**value, "pretokenizers": [_splitter(one) for one in _list(value.get("pretokenizers"))]}
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _KEEPS_TEXT or value.get("behavior") == "Removed" or value.get("replacement", SPACE) != SPACE:
        raise ModelFileError(f"it splits text by {kind!r} in a way that is not supported")
    if kind == "ByteLevel":
        return {**value, "add_prefix_space": False}
    if kind == "Metaspace":
        return {"type": kind, "replacement": SPACE, "prepend_scheme": "never", "split": value.get("split", True)}
    return value


def _normalizer(value: Any, splitter: Any) -> dict[str, Any] | None:
    """What writes spaces as SentencePiece does, where the pre-tokenizer does not."""
    inside = value.get("normalizers") if isinstance(value, dict) and value.get("type") == "Sequence" else [value]
    for one in inside if isinstance(inside, list) else [inside]:
        kind = one.get("type") if isinstance(one, dict) else None
        known = one is None or kind in ("NFC", "Prepend") or one == _SPACES
        if not known:
            raise ModelFileError(f"it normalises text by {kind!r} in a way that is not supported")
    return None if "Metaspace" in _types(splitter) else _SPACES


def _types(splitter: Any) -> set[str]:
    if not isinstance(splitter, dict):
        return set()
    return {str(splitter.get("type"))}.union(*(_types(one) for one in splitter.get("pretokenizers", [])))


def _built(document: dict[str, Any]) -> Bpe:
    try:
        return Bpe.from_str(json.dumps(document))
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise ModelFileError(f"it cannot be used: {str(error)[:300]}") from error


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ModelFileError(f"{str(value)[:100]!r} is no list")
    return value


def _pair(merge: Any) -> tuple[str, str]:
    """A merge, written as a pair or with a space between."""
    pair = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
        raise ModelFileError(f"{merge!r} is no merge of two tokens")
    return pair[0], pair[1]


def _is_id(token: object, vocab: int) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab
