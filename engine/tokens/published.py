"""A chat format as bytes, so that who has no model file can count and write tokens as its owner does."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from tokenizers import Tokenizer as Bpe

from engine.errors import ModelFileError
from engine.tokens.chat import ChatFormat
from engine.tokens.formats import format_named
from engine.tokens.vocabulary import Tables, Tokenizer

MAX_BYTES = 256 << 20  # of what was packed; a vocabulary of 150,000 tokens takes 17 MB
_VERSION = 1


@dataclass(frozen=True)
class PublishedChat:
    """`data` is compressed; `digest`, sha256 in hex of what it unpacks to, names it."""

    digest: str
    data: bytes


def publish_chat(tokenizer: Tokenizer, chat: ChatFormat) -> PublishedChat:
    """Both as bytes. Equal ones have equal digests, in every process."""
    tables, template = tokenizer.tables, chat.template
    document = {
        "version": _VERSION,
        "template": {"text": template.text, "bos": template.bos},
        **({"calls": chat.given_calls.name} if chat.given_calls else {}),
        "tokens": tables.tokens,
        "kinds": tables.kinds,
        "pieces": base64.b64encode(b"".join(tables.pieces)).decode(),
        "sizes": [len(piece) for piece in tables.pieces],
        "plain": tables.plain.to_str(),
        "special": tables.special.to_str(),
        "eos": tables.eos,
        "unwritable": tables.unwritable.pattern if tables.unwritable else None,
        "space": tables.space,
        "digest": tables.digest,
    }
    raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return PublishedChat(hashlib.sha256(raw).hexdigest(), zlib.compress(raw, 6))


def read_chat(published: PublishedChat) -> tuple[Tokenizer, ChatFormat]:
    """What was published. Raises ModelFileError where the bytes are not what their digest names."""
    raw = _unpacked(published.data)
    if hashlib.sha256(raw).hexdigest() != published.digest:
        raise ModelFileError(f"the chat format {published.digest[:12]} is damaged where it is kept")
    document: dict[str, Any] = json.loads(raw)
    if document["version"] != _VERSION:
        raise ModelFileError(f"the chat format {published.digest[:12]} was published by another release")
    joined = base64.b64decode(document["pieces"])
    ends = list(accumulate(document["sizes"], initial=0))
    tokenizer = Tokenizer(
        Tables(
            tokens=document["tokens"],
            kinds=document["kinds"],
            pieces=[joined[start:end] for start, end in pairwise(ends)],
            plain=Bpe.from_str(document["plain"]),
            special=Bpe.from_str(document["special"]),
            eos=tuple(document["eos"]),
            unwritable=re.compile(document["unwritable"]) if document["unwritable"] else None,
            digest=document["digest"],
            space=tuple(document["space"]) if document["space"] else None,
        )
    )
    calls = format_named(document.get("calls", "auto"))
    return tokenizer, ChatFormat(tokenizer, document["template"]["text"], document["template"]["bos"], calls)


def _unpacked(data: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ModelFileError(f"a chat format is damaged where it is kept: {error}") from error
    if not unpacking.eof:
        raise ModelFileError(f"a chat format is cut short where it is kept, or larger than {MAX_BYTES} bytes")
    return raw
