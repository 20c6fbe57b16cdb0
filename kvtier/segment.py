"""The format of a segment and of its manifest: pure functions between values and bytes.

    ID.seg   = header | table (key, digest per page) | seal | padding to 4096 | payloads, page_bytes each
    ID.json  = one JSON line | sha256 of that line, in hex

A segment counts only once its manifest exists; the manifest also says which pages are still live.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

VERSION: Final = 1
_MAGIC: Final = b"TNTOSEG1"
_HEAD = struct.Struct("<8sIIQ32s32sQB32s")  # magic, version, pages, page_bytes, layout, id, epoch, salt len, salt id
_ROW: Final = 64  # key, digest
HEAD_BYTES: Final = _HEAD.size
_ALIGN: Final = 4096


class FormatError(Exception):
    """These bytes are not a whole segment header or manifest of ours."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a segment says about itself; `rows` are (key, digest) in the order of the payloads."""

    segment_id: str
    layout: bytes
    page_bytes: int
    epoch: int
    salt_id: bytes
    rows: tuple[tuple[bytes, bytes], ...]

    @property
    def payload_offset(self) -> int:
        return payload_offset(len(self.rows))

    @property
    def segment_bytes(self) -> int:
        return segment_bytes(len(self.rows), self.page_bytes)

    def offset(self, row: int) -> int:
        return self.payload_offset + row * self.page_bytes


def table_bytes(pages: int) -> int:
    return HEAD_BYTES + pages * _ROW + 32


def payload_offset(pages: int) -> int:
    return -(-table_bytes(pages) // _ALIGN) * _ALIGN


def segment_bytes(pages: int, page_bytes: int) -> int:
    return payload_offset(pages) + pages * page_bytes


def encode_header(header: Header) -> bytes:
    head = _HEAD.pack(
        _MAGIC, VERSION, len(header.rows), header.page_bytes, header.layout, header.segment_id.encode(),
        header.epoch, len(header.salt_id), header.salt_id,
    )  # fmt: skip
    body = head + b"".join(key + digest for key, digest in header.rows)
    return (body + hashlib.sha256(body).digest()).ljust(header.payload_offset, b"\0")


def page_count(head: bytes) -> int:
    """How many rows follow, from the first HEAD_BYTES; bounded by what the reader then finds in the file."""
    if len(head) < HEAD_BYTES or head[:8] != _MAGIC:
        raise FormatError("not a segment")
    _, version, pages, *_ = _HEAD.unpack(head[:HEAD_BYTES])
    if version != VERSION:
        raise FormatError(f"segment version {version}")
    return int(pages)


def decode_header(raw: bytes) -> Header:
    """The header from the first `table_bytes(n)` bytes of a file."""
    pages = page_count(raw)
    end = table_bytes(pages) - 32
    if len(raw) < end + 32 or hashlib.sha256(raw[:end]).digest() != raw[end : end + 32]:
        raise FormatError("the segment's table is torn")
    _, _, _, page_bytes, layout, segment_id, epoch, salt_length, salt = _HEAD.unpack(raw[:HEAD_BYTES])
    starts = range(HEAD_BYTES, end, _ROW)
    rows = tuple((raw[at : at + 32], raw[at + 32 : at + _ROW]) for at in starts)
    name = segment_id.rstrip(b"\0").decode("ascii", "replace")
    return Header(name, layout, page_bytes, epoch, salt[:salt_length], rows)


def table_digest(header: Header) -> str:
    return hashlib.sha256(encode_header(header)).hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A segment that is complete on disk, and its live rows."""

    segment_id: str
    segment_bytes: int
    layout: bytes
    table: str
    live: frozenset[int]


def manifest_of(header: Header, live: Iterable[int]) -> Manifest:
    return Manifest(header.segment_id, header.segment_bytes, header.layout, table_digest(header), frozenset(live))


def encode_manifest(manifest: Manifest) -> bytes:
    line = json.dumps(
        {
            "version": VERSION,
            "segment": manifest.segment_id,
            "bytes": manifest.segment_bytes,
            "layout": manifest.layout.hex(),
            "table": manifest.table,
            "live": sorted(manifest.live),
        },
        separators=(",", ":"),
    ).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def decode_manifest(raw: bytes) -> Manifest:
    line, _, seal = raw.partition(b"\n")
    if hashlib.sha256(line).hexdigest().encode() + b"\n" != seal:
        raise FormatError("the manifest is torn")
    found = json.loads(line)
    if found["version"] != VERSION:
        raise FormatError(f"manifest version {found['version']}")
    layout = bytes.fromhex(found["layout"])
    return Manifest(found["segment"], found["bytes"], layout, found["table"], frozenset(found["live"]))


def runs(rows: Sequence[int], longest: int) -> list[range]:
    """Sorted rows as ranges of neighbours, none longer than `longest`: each is one read."""
    found: list[range] = []
    for row in rows:
        if found and found[-1].stop == row and len(found[-1]) < longest:
            found[-1] = range(found[-1].start, row + 1)
        else:
            found.append(range(row, row + 1))
    return found
