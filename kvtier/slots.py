"""The format of the host arena: its file header and its slots' headers, between values and bytes."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

VERSION: Final = 2
FILE_HEADER_BYTES: Final = 4096
SLOT_HEADER_BYTES: Final = 256
_FILE = struct.Struct("<8sIQQ32s")  # magic, version, page_bytes, stride, layout fingerprint
# magic, version, stamp, epoch, length, key, digest, salt length, salt id
_SLOT = struct.Struct("<4sIQQQ32s16sB32s")
_FILE_MAGIC: Final = b"TNTARENA"
_SLOT_MAGIC: Final = b"TSLT"
FREE = bytes(SLOT_HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class Slot:
    """A page in the arena: where it lies and what it must hash to."""

    index: int
    stamp: int
    epoch: int
    key: bytes
    digest: bytes
    salt_id: bytes


def _sealed(body: bytes, size: int) -> bytes:
    return (body + hashlib.sha256(body).digest()).ljust(size, b"\0")


def _unseal(raw: bytes, length: int) -> bytes | None:
    body, seal = raw[:length], raw[length : length + 32]
    return body if hashlib.sha256(body).digest() == seal else None


def stride_of(page_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return SLOT_HEADER_BYTES + -(-page_bytes // 256) * 256


def encode_file_header(page_bytes: int, layout: bytes) -> bytes:
    body = _FILE.pack(_FILE_MAGIC, VERSION, page_bytes, stride_of(page_bytes), layout)
    return _sealed(body, FILE_HEADER_BYTES)


def encode_slot(slot: Slot, page_bytes: int) -> bytes:
    body = _SLOT.pack(
        _SLOT_MAGIC, VERSION, slot.stamp, slot.epoch, page_bytes, slot.key, slot.digest,
        len(slot.salt_id), slot.salt_id,
    )  # fmt: skip
    return _sealed(body, SLOT_HEADER_BYTES)


def decode_slot(raw: bytes, index: int, page_bytes: int) -> Slot | None:
    """The slot that a header describes, or None where the header is not whole or not ours."""
    body = _unseal(raw, _SLOT.size)
    if body is None:
        return None
    magic, version, stamp, epoch, length, key, digest, salt_length, salt = _SLOT.unpack(body)
    if magic != _SLOT_MAGIC or version != VERSION or length != page_bytes or salt_length > len(salt):
        return None
    return Slot(index, stamp, epoch, key, digest, salt[:salt_length])
