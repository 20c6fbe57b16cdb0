"""An independent tokenizer: byte-pair encoding by the book, over regular expressions of the `regex` kind written by
hand.

Slow and plain. It shares no code with the product's tokenizer: merges by rank, one at a time, on Python strings; the
splitting of text is a hand-written scanner over Unicode categories instead of a regular expression.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import pairwise

CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


class PlainBpe:
    def __init__(self, tokens: list[str], merges: list[str], pre: str) -> None:
        self._ids = {token: index for index, token in enumerate(tokens)}
        self._ranks = {(m.split(" ", 1)[0], m.split(" ", 1)[1]): rank for rank, m in enumerate(merges)}
        self._pre = pre
        self._alphabet = _alphabet()

    def encode(self, text: str) -> list[int]:
        pieces = _qwen2(text) if self._pre == "qwen2" else _smollm(text)
        return [self._ids[symbol] for piece in pieces for symbol in self._merge(piece)]

    def writable(self, text: str) -> str:
        """The text with U+FFFD for what has no tokens."""
        return "".join(c if all(self._alphabet[b] in self._ids for b in c.encode()) else "\ufffd" for c in text)

    def _merge(self, piece: str) -> list[str]:
        symbols = [self._alphabet[byte] for byte in piece.encode()]
        while len(symbols) > 1:
            ranked = [(self._ranks.get(pair, 1 << 60), at) for at, pair in enumerate(pairwise(symbols))]
            rank, at = min(ranked)
            if rank == 1 << 60:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return symbols


def _alphabet() -> list[str]:
    visible = set(range(0x21, 0x7F)) | set(range(0xA1, 0xAD)) | set(range(0xAE, 0x100))
    table, spare = [], 0
    for byte in range(256):
        if byte in visible:
            table.append(chr(byte))
        else:
            table.append(chr(0x100 + spare))
            spare += 1
    return table


def _letter(c: str) -> bool:
    return unicodedata.category(c)[0] == "L"


def _number(c: str) -> bool:
    return unicodedata.category(c)[0] == "N"


def _space(c: str) -> bool:
    """White_Space as Unicode lists it: str.isspace() without the four information separators."""
    return c.isspace() and c not in "\x1c\x1d\x1e\x1f"


def _run(text: str, at: int, test: object) -> int:
    assert callable(test)
    while at < len(text) and test(text[at]):
        at += 1
    return at


def _other(c: str) -> bool:
    return not _space(c) and not _letter(c) and not _number(c)


def _qwen2(text: str) -> Iterator[str]:
    """Contractions (any case); an optional leading mark with letters; one digit; marks with newlines; newlines;
    spaces.
    """
    at = 0
    while at < len(text):
        end = _qwen2_end(text, at)
        yield text[at:end]
        at = end


def _qwen2_end(text: str, at: int) -> int:
    # the first alternative that matches wins, as in the published pattern
    for short in CONTRACTIONS:
        if _folds_to(text[at : at + len(short)], short):
            return at + len(short)
    c = text[at]
    letters = at if _letter(c) else at + 1 if c not in "\r\n" and not _number(c) else len(text)
    if letters < len(text) and _letter(text[letters]):
        return _run(text, letters, _letter)
    if _number(c):
        return at + 1
    marks = at + 1 if c == " " else at
    if marks < len(text) and _other(text[marks]):
        return _run(text, _run(text, marks, _other), lambda x: x in "\r\n")
    blank = _run(text, at, _space)
    newline = max((i for i in range(at, blank) if text[i] in "\r\n"), default=-1)
    if newline >= 0:
        return newline + 1
    return blank if blank == len(text) or blank - at == 1 else blank - 1


def _folds_to(piece: str, short: str) -> bool:
    """Case-insensitive in the simple sense of Unicode: the long s and the Kelvin sign fold too."""
    return len(piece) == len(short) and all(
        a == b or a.lower() == b or a.casefold() == b for a, b in zip(piece, short, strict=True)
    )


def _smollm(text: str) -> Iterator[str]:
    """Single digits first, then GPT-2's splitting of what lies between."""
    start = 0
    for at, c in enumerate(text):
        if _numeric(c):
            yield from _gpt2(text[start:at])
            yield c
            start = at + 1
    yield from _gpt2(text[start:])


def _numeric(c: str) -> bool:
    return _number(c)


def _gpt2(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = _gpt2_end(text, at)
        yield text[at:end]
        at = end


def _gpt2_end(text: str, at: int) -> int:
    for short in CONTRACTIONS:
        if text.startswith(short, at):
            return at + len(short)
    first = at + 1 if text[at] == " " and at + 1 < len(text) else at
    for kind in (_letter, _number, _other):
        if kind(text[first]):
            return _run(text, first, kind)
    blank = _run(text, at, _space)
    return blank if blank == len(text) or blank - at == 1 else blank - 1
