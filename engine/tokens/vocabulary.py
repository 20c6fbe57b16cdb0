"""Text to token ids and back, from the tables of a model; those inside a GGUF file are read here.

Control tokens in text are never parsed unless asked.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Bpe
from tokenizers.models import BPE

from engine.errors import ModelFileError, RequestError
from engine.gguf import GgufFile
from engine.modelfile import open_model

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens, as in GGUF
SPACE = "\u2581"  # how SentencePiece writes a space
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MAX_TEXT = 64 * 1024 * 1024
_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Tables:
    """What a tokenizer works with: texts, kinds and bytes of its tokens; its BPE without and with control tokens.

    `unwritable` matches what has no tokens; `space` spells out SPACE in tokens of bytes, where a token cannot hold it.
    """

    tokens: list[str]
    kinds: list[int]
    pieces: list[bytes]
    plain: Bpe
    special: Bpe
    eos: tuple[int, ...]
    unwritable: re.Pattern[str] | None
    digest: str
    space: tuple[int, ...] | None = None


class Tokenizer:
    """Byte-pair encoding of one model. Immutable and thread-safe.

    Text is taken as it is: no Unicode normalisation and no space put before it, so that `decode(encode(text)) == text`.
    Some vocabularies lack tokens for a few bytes; code points that need one of these become U+FFFD, visibly, instead of
    vanishing.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._tokens = tables.tokens
        self._bytes = tables.pieces
        self._control = frozenset(i for i, kind in enumerate(tables.kinds) if kind == CONTROL)
        self._unwritable = tables.unwritable
        self._plain, self._special = tables.plain, tables.special
        self._space = tables.space
        self.eos_token_ids = tables.eos
        self.digest = tables.digest

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of `text`. With `allow_special`, control tokens written in it become those tokens.

        Lone surrogates, which no UTF-8 can carry, become U+FFFD. Raises RequestError above 64 Mi characters.
        """
        if len(text) > _MAX_TEXT:
            raise RequestError("bad_request", f"a text of {len(text)} characters is more than the {_MAX_TEXT} allowed")
        clean = text.encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")
        if self._unwritable is not None:
            clean = self._unwritable.sub("\ufffd", clean)
        bpe = self._special if allow_special else self._plain
        pieces = [clean] if self._space is None else clean.split(SPACE)
        ids: list[int] = bpe.encode(pieces[0]).ids
        for piece in pieces[1:]:
            ids += [*(self._space or ()), *bpe.encode(piece).ids]
        return ids

    def decode(self, ids: Sequence[int], show_control: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Control tokens give no text unless `show_control`."""
        return self.decode_bytes(ids, show_control).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int], show_control: bool = False) -> bytes:
        """The exact bytes of `ids`. Raises RequestError for an id outside the vocabulary."""
        return b"".join(self.piece(i, show_control) for i in ids)

    def piece(self, token: int, show_control: bool = False) -> bytes:
        """The bytes of one token, empty for a control token unless `show_control`."""
        if not 0 <= token < len(self._bytes):
            raise RequestError(
                "token_out_of_range", f"token id {token} is outside the vocabulary of {len(self._bytes)}"
            )
        return self._bytes[token] if show_control or token not in self._control else b""

    def is_control(self, token: int) -> bool:
        return token in self._control

    def control_texts(self) -> list[str]:
        """How the control tokens are written, longest first."""
        return sorted((self._tokens[i] for i in self._control), key=len, reverse=True)


class StreamDecoder:
    """Token ids in, text out, in pieces. Never splits a code point; `finish()` gives what an abandoned one left.
    `shown`: control tokens that give their text."""

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        pieces = (self._tokenizer.piece(token, show_control=token in self._shown) for token in ids)
        return self._decoder.decode(b"".join(pieces))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model, a file or a directory.

    Raises ModelFileError when its tables are missing, damaged or of another kind.
    """
    with open_model(path) as model:
        return model.tokenizer()


def tokenizer_from(file: GgufFile) -> Tokenizer:
    """As `load_tokenizer`, from an open GGUF file."""
    meta = file.metadata
    if meta.get("tokenizer.ggml.model") != "gpt2":
        raise ModelFileError(
            f"{file.path} has a {meta.get('tokenizer.ggml.model')!r} tokenizer; byte-level BPE ('gpt2') is supported"
        )
    pre = meta.get("tokenizer.ggml.pre")
    if pre not in ("qwen2", "smollm"):
        raise ModelFileError(f"{file.path} splits its text as {pre!r}; 'qwen2' and 'smollm' are supported")
    tokens = _list(file, "tokenizer.ggml.tokens", str)
    kinds = _list(file, "tokenizer.ggml.token_type", int)
    merges = _list(file, "tokenizer.ggml.merges", str)
    if len(kinds) != len(tokens):
        raise ModelFileError(f"{file.path} has {len(tokens)} tokens and {len(kinds)} token types")
    if len(set(tokens)) != len(tokens):
        raise ModelFileError(f"{file.path} names a token twice")
    eos = meta.get("tokenizer.ggml.eos_token_id")
    if not isinstance(eos, int) or not 0 <= eos < len(tokens):
        raise ModelFileError(f"{file.path} has the end token {eos!r}, outside its vocabulary of {len(tokens)}")
    known = set(tokens)
    for merge in merges:
        left, right = _pair(merge)
        if left not in known or right not in known or left + right not in known:
            raise ModelFileError(f"{file.path} has the merge {merge!r} of tokens that it does not have")
    return Tokenizer(_tables(tokens, kinds, merges, pre, eos))


def _tables(tokens: list[str], kinds: list[int], merges: list[str], pre: str, eos: int) -> Tables:
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in merges]
    plain, special = _bpe(vocab, pairs, pre), _bpe(vocab, pairs, pre)
    special.add_special_tokens([_added(tokens[i], True) for i, kind in enumerate(kinds) if kind == CONTROL])
    special.add_tokens([_added(tokens[i], False) for i, kind in enumerate(kinds) if kind == USER_DEFINED])
    extra = vocab.get(_END_OF_TEXT)
    ends = (eos,) if extra in (None, eos) else (eos, extra)
    return Tables(
        tokens=tokens,
        kinds=kinds,
        pieces=[token_bytes(token, kind) for token, kind in zip(tokens, kinds, strict=True)],
        plain=plain,
        special=special,
        eos=ends,
        unwritable=unwritable(vocab),
        digest=_digest(tokens, kinds, merges, pre, ends),
    )


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
        raise ModelFileError(f"{file.path}: metadata {key!r} is missing or not a list of {kind.__name__}")
    return value


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], pre: str) -> Bpe:
    bpe = Bpe(BPE(vocab=vocab, merges=merges))
    if pre == "qwen2":
        split: Any = pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        split = pre_tokenizers.Digits(individual_digits=True)
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _added(text: str, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


@cache
def byte_of() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(shifted)}


def unwritable(vocab: dict[str, int]) -> re.Pattern[str] | None:
    """Matches code points whose first UTF-8 byte has no token; None where every byte has one."""
    missing = {byte for char, byte in byte_of().items() if char not in vocab}
    if missing & set(range(0x80, 0xC0)):
        raise ModelFileError("the tokenizer has no tokens for UTF-8's continuation bytes; it cannot write text")
    ranges = [(byte, byte) for byte in missing if byte < 0x80]
    ranges += [((byte & 0x1F) << 6, ((byte & 0x1F) << 6) + 0x3F) for byte in missing if 0xC2 <= byte < 0xE0]
    ranges += [((byte & 0xF) << 12, ((byte & 0xF) << 12) + 0xFFF) for byte in missing if 0xE0 <= byte < 0xF0]
    ranges += [
        ((byte & 7) << 18, min(0x10FFFF, ((byte & 7) << 18) + 0x3FFFF)) for byte in missing if 0xF0 <= byte < 0xF5
    ]
    if not ranges:
        return None
    return re.compile("[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in sorted(ranges)) + "]")


def token_bytes(token: str, kind: int) -> bytes:
    """What a token of byte-level BPE, or a token that was added, stands for."""
    if kind == UNUSED:
        return b""
    if kind in (CONTROL, USER_DEFINED):
        return token.encode()
    alphabet = byte_of()
    if all(char in alphabet for char in token):
        return bytes(alphabet[char] for char in token)
    return token.encode()


def _digest(tokens: list[str], kinds: list[int], merges: list[str], pre: str, eos: tuple[int, ...]) -> str:
    digest = hashlib.sha256(f"{pre}\0{eos}\0{len(tokens)}\0{len(merges)}\0".encode())
    for text in (*tokens, *merges):
        raw = text.encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    digest.update(",".join(map(str, kinds)).encode())
    return digest.hexdigest()
