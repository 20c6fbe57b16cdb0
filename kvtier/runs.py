"""Reading segments: neighbouring pages in one read, several reads in flight, verified and decoded on the way."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from enum import Enum
from typing import Final, TypeAlias

from kvtier.codec import Codec
from kvtier.direct import SpanReader
from kvtier.errors import UndecodableError
from kvtier.fileops import Buffer
from kvtier.files import SegmentFiles
from kvtier.index import Held
from kvtier.keys import begin_digest, page_digest
from kvtier.reads import Readers
from kvtier.segment import Row
from kvtier.stripes import Progress, Striped, Stripes

_READ_BYTES: Final = 2 * 2**20


class Bad(Enum):
    """Why a page that was read is none."""

    DAMAGED = "damaged"
    UNDECODABLE = "undecodable"


Run: TypeAlias = tuple[Held, range]
Outcome: TypeAlias = Buffer | Bad
Landed: TypeAlias = list[Outcome] | OSError


class RunReader:
    """Touches neither index nor counters, so it runs in any thread."""

    def __init__(self, files: SegmentFiles, spans: SpanReader, readers: Readers, codec: Codec, page_bytes: int) -> None:
        self._files, self._spans, self._readers, self._codec = files, spans, readers, codec
        self.page_bytes, self.pages = page_bytes, max(1, _READ_BYTES // page_bytes)  # of one read, at most
        self.each, self.span, self.threads = readers.map, spans.read, readers.threads

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._spans.direct

    def land(self, plan: Sequence[Run], rooms: Mapping[bytes, memoryview]) -> list[Future[Landed]]:
        """By run, see `Readers.run`: its pages, which then lie in their rooms, or what the file system said."""
        return self._readers.run(lambda run: self._land(run, rooms), plan)

    def _land(self, run: Run, rooms: Mapping[bytes, memoryview]) -> Landed:
        held, rows = run
        header = held.header
        try:
            if self.is_plain(held, rows):
                return self._land_plain(held, rows, [rooms[header.rows[row][0]] for row in rows])
            pages = self.stored(held, rows)
        except OSError as error:
            return error
        outcomes = [self._decode(held, row, page) for row, page in zip(rows, pages, strict=True)]
        for row, outcome in zip(rows, outcomes, strict=True):
            if not isinstance(outcome, Bad):
                rooms[header.rows[row][0]][:] = memoryview(outcome)
        return outcomes

    def _land_plain(self, held: Held, rows: range, rooms: Sequence[memoryview]) -> list[Outcome]:
        """What lies in the file is the page: read it to where it is wanted, and verify it there."""
        header = held.header
        self._spans.fill(self._files.segment_path(held.id), header.spans(rows)[0], rooms)
        return [
            room if page_digest(key, header.salt_id, room) == digest else Bad.DAMAGED
            for (key, digest, _), room in zip(header.rows[rows.start : rows.stop], rooms, strict=True)
        ]

    def land_striped(self, shares: Sequence[Sequence[Striped]], stripes: Stripes) -> list[Future[Landed]]:
        """As `land`, stripe by stripe, a reader for each share. All pages are stored as they are."""
        progress = Progress(stripes, len(shares))
        return self._readers.run(lambda share: self._land_share(share, stripes, progress), shares, stripes.deadline_s)

    def _land_share(self, share: Sequence[Striped], stripes: Stripes, progress: Progress) -> Landed:
        rows = [page.held.header.rows[page.row] for page in share]
        digests = [
            begin_digest(key, page.held.header.salt_id, size) for page, (key, _, size) in zip(share, rows, strict=True)
        ]
        begin = 0
        try:
            with ExitStack() as files:
                paths = {page.held.id: self._files.segment_path(page.held.id) for page in share}
                fills = {name: files.enter_context(self._spans.opened(path)) for name, path in paths.items()}
                for stripe, end in enumerate(stripes.ends):
                    for page, digest in zip(share, digests, strict=True):
                        part = page.room[begin:end]
                        fills[page.held.id](page.begin + begin, part)
                        digest.update(part)
                    progress.mark(stripe)
                    begin = end
        except OSError as error:
            return error
        return [
            page.room if digest.digest() == row[1] else Bad.DAMAGED
            for page, digest, row in zip(share, digests, rows, strict=True)
        ]

    def is_plain(self, held: Held, rows: Sequence[int]) -> bool:
        """Whether what lies in the file are these pages themselves."""
        return self._codec.is_plain(held.header.form) and all(
            held.header.rows[row][2] == self.page_bytes for row in rows
        )

    def fetch(self, plan: Sequence[Run]) -> list[list[Outcome] | OSError | None]:
        """By run: its pages, or what the file system said, or None where it did not answer in time."""
        return self._readers.map(self._fetch, plan)

    def _fetch(self, run: Run) -> list[Outcome] | OSError:
        held, rows = run
        try:
            pages = self.stored(held, rows)
        except OSError as error:
            return error
        return [self._decode(held, row, page) for row, page in zip(rows, pages, strict=True)]

    def _decode(self, held: Held, row: int, stored: Buffer | None) -> Outcome:
        if stored is None:
            return Bad.DAMAGED
        header = held.header
        try:
            return self._codec.decode(header.form, header.rows[row][0], header.salt_id, stored)
        except UndecodableError:
            return Bad.UNDECODABLE

    def stored(self, held: Held, rows: range) -> list[Buffer | None]:
        """Payloads as they are stored; None where one does not verify. May raise OSError."""
        span, header = self.raw(held, rows), held.header
        pages: list[Buffer | None] = []
        for key, digest, size in header.rows[rows.start : rows.stop]:
            page, span = span[:size], span[size:]
            pages.append(page if page_digest(key, header.salt_id, page) == digest else None)
        return pages

    def live(self, held: Held) -> tuple[list[Row], list[Buffer]]:
        """Live rows that verify, and what is stored of them. OSError where the disk refuses, or is too slow."""
        rows: list[Row] = []
        pages: list[Buffer] = []
        for row, read in self._each(held, sorted(held.live)):
            if read[0] is not None:
                rows.append(held.header.rows[row])
                pages.append(read[0])
        return rows, pages

    def _each(self, held: Held, rows: Sequence[int]) -> Iterator[tuple[int, list[Buffer | None]]]:
        reads = self._readers.map(lambda row: self.stored(held, range(row, row + 1)), rows)
        for row, read in zip(rows, reads, strict=True):
            if read is None:
                raise OSError(errno.ETIMEDOUT, "the disk takes too long")
            yield row, read

    def raw(self, held: Held, rows: range) -> memoryview:
        """What lies in the file where these payloads should be. May raise OSError, and waits for the disk."""
        begin, sizes = held.header.spans(rows)
        return self._spans.read(self._files.segment_path(held.id), begin, sum(sizes))

    def raw_in_time(self, held: Held, rows: range) -> memoryview:
        """As `raw`; OSError where the disk is too slow."""
        (span,) = self._readers.map(lambda run: self.raw(held, run), [rows])
        if span is None:
            raise OSError(errno.ETIMEDOUT, "the disk takes too long")
        return span
