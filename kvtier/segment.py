"""The format of a segment and of its manifest: pure functions between values and bytes.

    ID.seg   = header | table (key, digest, stored bytes per page) | seal | padding to 4096 | payloads
    ID.json  = one JSON line | sha256 of that line, in hex

A segment counts only once its manifest exists; the manifest also says which pages are still live. Digests
are over payloads as they are stored: after compression and encryption, which the header names (`Form`).
In a shared store a page is a segment of one page, without a manifest.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvtier.errors import ForeignError, FormatError

VERSION: Final = 3
KEY_ID_MAX_BYTES: Final = 16
_MAGIC: Final = b"TNTOSEG1"
# magic, version, pages, page_bytes, layout, id, epoch, salt len, salt id, compression, planes, key id len, key id
_HEAD = struct.Struct("<8sIIQ32s32sQB32sBBB16s")
_ROW = struct.Struct("<32s16sI")  # key, digest, stored bytes
HEAD_BYTES: Final = _HEAD.size
ALIGN: Final = 4096


Row: TypeAlias = tuple[bytes, bytes, int]  # key, digest of what is stored, its length in bytes


@dataclass(frozen=True, slots=True)
class Form:
    """How the payloads of a segment are stored; the default is as they came.

    `compression` is a `codec.Compression`; `planes` > 1 means that byte i of every element lies in plane i;
    `key_id` names the key that they are encrypted with, empty for none.
    """

    compression: int = 0
    planes: int = 1
    key_id: bytes = b""


@dataclass(frozen=True, slots=True)
class Header:
    """What a segment says about itself; `rows` are in the order of the payloads."""

    segment_id: str
    layout: bytes
    page_bytes: int
    epoch: int
    salt_id: bytes
    rows: tuple[Row, ...]
    form: Form = Form()

    @property
    def payload_offset(self) -> int:
        return payload_offset(len(self.rows))

    @property
    def segment_bytes(self) -> int:
        return self.payload_offset + sum(size for _, _, size in self.rows)

    def spans(self, rows: range) -> tuple[int, list[int]]:
        """Where neighbouring payloads begin in the file, and the length of each."""
        begin = self.payload_offset + sum(size for _, _, size in self.rows[: rows.start])
        return begin, [size for _, _, size in self.rows[rows.start : rows.stop]]


def table_bytes(pages: int) -> int:
    return HEAD_BYTES + pages * _ROW.size + 32


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def payload_offset(pages: int) -> int:
    return aligned(table_bytes(pages))


def segment_bytes(pages: int, stored_bytes: int) -> int:
    """Of a segment whose payloads take `stored_bytes` each."""
    return payload_offset(pages) + pages * stored_bytes


def encode_header(header: Header) -> bytes:
    head = _HEAD.pack(
        _MAGIC, VERSION, len(header.rows), header.page_bytes, header.layout, header.segment_id.encode(),
        header.epoch, len(header.salt_id), header.salt_id,
        header.form.compression, header.form.planes, len(header.form.key_id), header.form.key_id,
    )  # fmt: skip
    body = head + b"".join(_ROW.pack(*row) for row in header.rows)
    return (body + hashlib.sha256(body).digest()).ljust(header.payload_offset, b"\0")


def page_count(head: bytes) -> int:
    """How many rows follow, from the first HEAD_BYTES; bounded by what the reader then finds in the file."""
    if len(head) < HEAD_BYTES or head[:8] != _MAGIC:
        raise FormatError("not a segment")
    _, version, pages, *_ = _HEAD.unpack(head[:HEAD_BYTES])
    if version != VERSION:
        raise ForeignError(f"segment version {version}")
    return int(pages)


def decode_header(raw: bytes) -> Header:
    """The header from the first `table_bytes(n)` bytes of a file."""
    pages = page_count(raw)
    end = table_bytes(pages) - 32
    if len(raw) < end + 32 or hashlib.sha256(raw[:end]).digest() != raw[end : end + 32]:
        raise FormatError("the segment's table is torn")
    _, _, _, page_bytes, layout, segment_id, epoch, salt_length, salt, compression, planes, key_length, key_id = (
        _HEAD.unpack(raw[:HEAD_BYTES])
    )
    rows: tuple[Row, ...] = tuple(_ROW.iter_unpack(raw[HEAD_BYTES:end]))
    name = segment_id.rstrip(b"\0").decode("ascii", "replace")
    form = Form(compression, planes, key_id[:key_length])
    return Header(name, layout, page_bytes, epoch, salt[:salt_length], rows, form)


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
        raise ForeignError(f"manifest version {found['version']}")
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
