"""A page as one blob of a shared store: a segment of one page, without a manifest."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.codec import PageForm
from kvtier.errors import ForeignError, FormatError
from kvtier.fileops import Buffer
from kvtier.keys import page_digest
from kvtier.segment import VERSION, Header, decode_header, encode_header, table_bytes


@dataclass(frozen=True, slots=True)
class Blob:
    """What is written, in parts; `stored_bytes` of it are the payload."""

    parts: list[Buffer]
    size_bytes: int
    stored_bytes: int


class PageBlobs:
    """Between pages and blobs."""

    def __init__(self, form: PageForm) -> None:
        self._page_bytes, self._codec, self._layout = form.page_bytes, form.codec, form.layout(VERSION)

    def encode(self, key: bytes, payload: Buffer, epoch: int, salt_id: bytes) -> Blob:
        """NoKeyError where nothing of this domain may be stored."""
        form, (stored,) = self._codec.encode([(key, payload)], salt_id)
        size = memoryview(stored).nbytes
        row = (key, page_digest(key, salt_id, stored), size)
        header = Header(key.hex()[:32], self._layout, self._page_bytes, epoch, salt_id, (row,), form)
        return Blob([encode_header(header), stored], header.segment_bytes, size)

    def decode(self, key: bytes, raw: Buffer) -> Buffer:
        """The page; FormatError for damage, ForeignError and UndecodableError for what others can read."""
        header = decode_header(bytes(raw[: table_bytes(1)]))
        if header.layout != self._layout:
            raise ForeignError("another model or layout")
        if len(header.rows) != 1 or header.rows[0][0] != key or header.segment_bytes != len(raw):
            raise FormatError("another page, or another length")
        _, digest, size = header.rows[0]
        stored = memoryview(raw)[header.payload_offset :][:size]
        if page_digest(key, header.salt_id, stored) != digest:
            raise FormatError("the payload does not verify")
        return self._codec.decode(header.form, key, header.salt_id, stored)
