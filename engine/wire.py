"""Frames between engine and client: four bytes of big-endian length, then that many bytes of JSON (an object)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import RequestError

MAX_FRAME_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class ModelCard:
    """What an engine serves. `kv_pool_tokens` counts the device pool; `boot_id` changes with every start.

    kv: own, or external: a model server keeps it, `context_length` counts its tokens, and those of the transcript are
    bytes. exact: whether the promises of exactness hold. server: which kind of server, and `continues` whether it goes
    on after a message that was begun. refuses: options of a session that cannot be had there.
    """

    model: str
    fingerprint: str
    backend: str
    mode: str
    dtype: str
    context_length: int
    vocab_size: int
    kv_bytes_per_token: int
    page_size: int
    tokenizer_digest: str
    boot_id: str
    eos_token_ids: tuple[int, ...]
    kv_pool_tokens: int
    kv: str = "own"
    exact: bool = True
    server: str = ""
    continues: bool = False
    refuses: tuple[str, ...] = ()

    @property
    def external(self) -> bool:
        return self.kv == "external"

    def as_message(self) -> dict[str, Any]:
        return {**asdict(self), **{name: list(getattr(self, name)) for name in _LISTS}}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> ModelCard:
        """Of an engine of an earlier release, what it did not know of is as it was then."""
        fields = {name: message[name] for name in cls.__dataclass_fields__ if name not in _LATER or name in message}
        return cls(**{**fields, **{name: tuple(fields[name]) for name in _LISTS if name in fields}})


_LISTS = ("eos_token_ids", "refuses")
_LATER = ("kv", "exact", "server", "continues", "refuses")


def encode_frame(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next frame. Raises IncompleteReadError at the end, RequestError (bad_frame) for what is no frame."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME_BYTES:
        raise RequestError("bad_frame", f"a frame of {size} bytes is more than the {MAX_FRAME_BYTES} allowed")
    body = await reader.readexactly(size)
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError("bad_frame", f"a frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise RequestError("bad_frame", "a frame must be a JSON object")
    return message


def parse_address(address: str | Path) -> tuple[str, int] | str:
    """`host:port` as a pair; anything with a slash, and any Path, is a unix socket."""
    text = str(address)
    host, colon, port = text.rpartition(":")
    if isinstance(address, Path) or "/" in text or not colon or not port.isdigit():
        return text
    return host.strip("[]"), int(port)
