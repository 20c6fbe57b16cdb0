"""Writing segments: encoded, digested in several threads, durable when it returns."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from kvtier.codec import PageForm
from kvtier.fileops import Buffer
from kvtier.files import SegmentFiles
from kvtier.index import Held
from kvtier.keys import page_digest
from kvtier.segment import VERSION, Form, Header, Row, encode_manifest, manifest_of, segment_bytes


def footprint(pages: int, stored_bytes: int) -> int:
    """What a new segment takes at most, its manifest included."""
    return segment_bytes(pages, stored_bytes) + 512 + 7 * pages


class SegmentWriter:
    """May raise OSError, and leaves nothing then."""

    def __init__(self, files: SegmentFiles, form: PageForm, pool: Executor) -> None:
        self._files, self._form, self._pool = files, form, pool

    def write(self, pages: Sequence[tuple[bytes, Buffer]], epoch: int, salt_id: bytes) -> Held:
        """A new segment of at least one page. NoKeyError where nothing of this domain may be stored."""
        form, stored = self._form.codec.encode(pages, salt_id)
        keys = [key for key, _ in pages]
        digests = self._pool.map(lambda item: page_digest(item[0], salt_id, item[1]), zip(keys, stored, strict=True))
        rows = [(key, digest, memoryview(one).nbytes) for key, digest, one in zip(keys, digests, stored, strict=True)]
        return self._write(rows, stored, epoch, salt_id, form)

    def write_again(self, header: Header, rows: Sequence[Row], stored: Sequence[Buffer]) -> Held:
        """Some payloads of another segment, as they are stored there."""
        return self._write(rows, stored, header.epoch, header.salt_id, header.form)

    def _write(self, rows: Sequence[Row], stored: Sequence[Buffer], epoch: int, salt_id: bytes, form: Form) -> Held:
        layout = self._form.layout(VERSION)
        header = Header(self._files.new_id(), layout, self._form.page_bytes, epoch, salt_id, tuple(rows), form)
        manifest = manifest_of(header, range(len(rows)))
        self._files.write_segment(header, stored, manifest)
        return Held(header, set(manifest.live), len(encode_manifest(manifest)))
