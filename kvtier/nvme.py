"""The NVMe tier: an index over segments, a budget over everything in the directory.

One put is one segment (or several, when large). The unit of eviction is the segment, least recently used
first; the unit of deletion is the page: the manifest is rewritten without it, a segment without live
pages is removed, one that is more than half dead is rewritten.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from kvtier.errors import TierConfigError, TierIntegrityError
from kvtier.fileops import Buffer, Io
from kvtier.files import SegmentFiles
from kvtier.index import Held, SegmentIndex
from kvtier.keys import layout_fingerprint, page_digest
from kvtier.segment import (
    VERSION,
    FormatError,
    Header,
    encode_manifest,
    manifest_of,
    segment_bytes,
    table_digest,
)
from kvtier.values import Stored, TierCounts

_SEGMENT_BYTES: Final = 32 * 2**20
_SEGMENT_PAGES: Final = 1024
_READ_BYTES: Final = 2 * 2**20
_QUARANTINE_SHARE: Final = 16


def footprint(pages: int, page_bytes: int) -> int:
    """What a new segment takes at most, its manifest included."""
    return segment_bytes(pages, page_bytes) + 512 + 7 * pages


class NvmeStore:
    """Pages under one directory. Thread-safe: `_writer` orders changes, readers take no lock on files."""

    def __init__(
        self, root: Path, budget_bytes: int, page_bytes: int, fingerprint: bytes, io: Io, pool: Executor
    ) -> None:
        if budget_bytes < (least := footprint(1, page_bytes)):
            raise TierConfigError(
                f"nvme_bytes is {budget_bytes}; one page needs {least}. Raise it, or use 0 for no tier"
            )
        self.page_bytes, self._budget, self._pool = page_bytes, budget_bytes, pool
        self._layout = layout_fingerprint(fingerprint, page_bytes, VERSION)
        self._files = SegmentFiles(root, io, budget_bytes // _QUARANTINE_SHARE)
        self._writer, self._count_lock = threading.RLock(), threading.Lock()
        self._index = SegmentIndex()
        self._folders: dict[Path, int] = {}
        self._counts: Counter[str] = Counter()
        try:
            if self._files.hold_lease():
                self._counts["swept"] = self._files.sweep()
            self._scan()
            while self._used() > self._budget and self._evict_one(set()):
                pass
        except OSError as error:
            self.close()
            raise TierConfigError(f"the NVMe directory {root} cannot be read: {error}") from error
        self._counts["adopted"] = len(self._index)

    def close(self) -> None:
        with self._writer:
            self._files.close()

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def keys(self) -> set[bytes]:
        return self._index.keys()

    # --- what is on disk -----------------------------------------------------------------------------

    def _refresh(self) -> None:
        """A scan that may fail: then what is known stands."""
        try:
            self._scan()
        except OSError:
            self._count("io_errors")

    def _scan(self) -> None:
        """Takes in what other processes wrote or removed, in the folders whose times changed; oldest first."""
        found: dict[str, Path] = {}
        for folder in self._files.fan_out():
            changed = folder.stat().st_mtime_ns
            if self._folders.get(folder) == changed:
                continue
            self._folders[folder] = changed
            paths = {path.stem: path for path in self._files.manifests(folder)}
            known = self._index.known(folder.name)
            for segment_id in known - paths.keys():
                self._index.forget(segment_id)
            found |= {segment_id: paths[segment_id] for segment_id in paths.keys() - known}
        for segment_id in sorted(found):
            self._admit(found[segment_id])

    def _admit(self, path: Path) -> None:
        """A segment found on disk: indexed, or counted as foreign, or set aside."""
        try:
            held = self._inspect(path)
        except (FileNotFoundError, FormatError):
            if path.exists():  # else another process removed both meanwhile
                self._count("quarantined")
                if self._files.hold_lease():
                    self._files.set_aside(path.stem)
        except OSError:
            self._count("io_errors")
        else:
            if held is not None:
                self._enter(held)

    def _inspect(self, path: Path) -> Held | None:
        """A whole segment of ours; None where it is whole and another model's or layout's."""
        size = self._files.size(path)
        manifest = self._files.read_manifest(path)
        if manifest.layout != self._layout:
            self._count("foreign")
            segment = self._files.segment_path(manifest.segment_id)
            self._index.add_foreign(manifest.segment_id, size + self._files.size(segment))
            return None
        header = self._files.read_header(manifest)
        if table_digest(header) != manifest.table or header.layout != self._layout:
            raise FormatError("the table is not the one that the manifest names")
        if not manifest.live <= set(range(len(header.rows))):
            raise FormatError("the manifest names pages that the segment does not have")
        return Held(header, set(manifest.live), size)

    def _enter(self, held: Held) -> None:
        doubles = self._index.add(held)
        if doubles:  # so copies never pile up
            self._count("swept", len(doubles))
            self._settle(held)

    def _used(self) -> int:
        return self._index.size_bytes() + self._files.quarantine_size()

    # --- reading -------------------------------------------------------------------------------------

    def read(self, keys: Iterable[bytes]) -> dict[bytes, bytearray]:
        """Verified copies of the pages that are here; several reads in flight."""
        wanted = set(keys)
        plan = self._index.plan(wanted, max(1, _READ_BYTES // self.page_bytes))
        found: dict[bytes, bytearray] = {}
        # As in the host tier: nothing that runs in the pool takes `_writer`.
        for (held, rows), pages in zip(plan, self._pool.map(self._fetch, plan), strict=True):
            for row, (payload, good) in zip(rows, pages, strict=True):
                if good:
                    found[held.header.rows[row][0]] = payload
                else:
                    self._quarantine(held, row, payload)
        self._count("hits", len(found))
        self._count("misses", len(wanted) - len(found))
        return found

    def _fetch(self, item: tuple[Held, range]) -> list[tuple[bytearray, bool]]:
        held, rows = item
        try:
            pages = self._files.read_pages(held.header, rows)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._count("io_errors")
            return [(bytearray(), False) for _ in rows]
        return [(page, self._verifies(held.header, row, page)) for row, page in zip(rows, pages, strict=True)]

    @staticmethod
    def _verifies(header: Header, row: int, payload: bytearray) -> bool:
        key, digest = header.rows[row]
        return page_digest(key, header.salt_id, payload) == digest

    def _quarantine(self, held: Held, row: int, payload: bytearray) -> None:
        """A page that did not verify, unless its segment was removed while it was read."""
        with self._writer:
            if not self._index.is_current(held, row):
                return
            if not self._files.segment_path(held.id).exists():
                self._index.forget(held.id)  # another process deleted it: a miss, nothing is wrong
                return
            self._count("quarantined")
            self._index.kill(held, [row])
            if payload and self._files.hold_lease():
                self._files.keep_bad_page(held.id, row, payload)
            self._settle(held)

    # --- writing -------------------------------------------------------------------------------------

    def put(
        self, pages: Sequence[tuple[bytes, Buffer]], *, epoch: int, salt_id: bytes, beside: Sequence[bytes] = ()
    ) -> Stored:
        """Durable when it returns. Makes room by removing the least recently used segments.

        Segments that hold one of these keys, or of the keys `beside` them, are not removed for it.
        """
        with self._writer:
            self._refresh()
            keep = self._index.touch([*(key for key, _ in pages), *beside])
            fresh = [page for page in pages if page[0] not in self._index]
            present, written, detail = len(pages) - len(fresh), 0, ""
            most = max(1, min(_SEGMENT_PAGES, _SEGMENT_BYTES // self.page_bytes))
            while written < len(fresh) and not detail:
                batch = fresh[written : written + most]
                room = self._make_room(len(batch), keep)
                if room < len(batch):
                    detail = f"the NVMe budget of {self._budget} bytes is used up"
                try:
                    keep |= self._write(batch[:room], epoch, salt_id)
                    written += room
                except OSError as error:
                    self._count("io_errors")
                    detail = f"a segment could not be written: {error.strerror or error}"
            self._count("stored", written)
            return Stored(present + written, written, detail)

    def _write(self, pages: Sequence[tuple[bytes, Buffer]], epoch: int, salt_id: bytes) -> set[str]:
        """The id of the new segment, if there was anything to write."""
        if not pages:
            return set()
        digests = self._pool.map(lambda page: page_digest(page[0], salt_id, page[1]), pages)
        rows = tuple((key, digest) for (key, _), digest in zip(pages, digests, strict=True))
        header = Header(self._files.new_id(), self._layout, self.page_bytes, epoch, salt_id, rows)
        manifest = manifest_of(header, range(len(rows)))
        self._files.write_segment(header, [payload for _, payload in pages], manifest)
        self._enter(Held(header, set(manifest.live), len(encode_manifest(manifest))))
        return {header.segment_id}

    def _make_room(self, pages: int, keep: set[str]) -> int:
        """How many of the pages fit, after evicting what may go."""
        while pages and footprint(pages, self.page_bytes) > self._budget:
            pages -= 1
        used = self._used()
        while pages and used + footprint(pages, self.page_bytes) > self._budget:
            freed = self._evict_one(keep)
            used -= freed
            if not freed:
                pages -= 1
        return pages

    def _evict_one(self, keep: set[str]) -> int:
        """Removes one segment; bytes freed, 0 where nothing may go."""
        if self._files.hold_lease():
            for segment_id, size_bytes in self._index.victims(keep):
                if self._remove(segment_id, "evicted"):
                    return size_bytes
        return 0

    def _remove(self, segment_id: str, reason: str) -> bool:
        try:
            self._files.remove_segment(segment_id)
        except OSError:
            self._count("io_errors")
            return False
        self._count(reason, self._index.forget(segment_id))
        return True

    # --- deleting ------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[bytes]) -> int | None:
        """How many pages went; None where another process holds the right to delete.

        Their bytes stay unreadable in the segment until it is removed or rewritten.
        """
        with self._writer:
            if not self._files.hold_lease():
                return None
            self._refresh()
            gone = 0
            for held, rows in self._index.locate(set(keys)):
                self._index.kill(held, rows)
                gone += len(rows) if self._settle(held) else 0
            self._count("deleted", gone)
            return gone

    def _settle(self, held: Held) -> bool:
        """Makes the disk agree that rows died: rewrite the manifest, or the segment, or remove it."""
        if not self._files.hold_lease():
            return False
        if not held.live:
            return self._remove(held.id, "deleted")
        manifest = manifest_of(held.header, held.live)
        try:
            self._files.write_manifest(manifest)
            held.manifest_bytes = len(encode_manifest(manifest))
            if 2 * len(held.live) < len(held.header.rows):
                self._compact(held)
        except OSError:
            # No room for a manifest: the promise to delete is worth more than the pages that stay.
            self._count("io_errors")
            return self._remove(held.id, "evicted")
        return True

    def _compact(self, held: Held) -> None:
        """Rewrites the live pages. The old manifest is already right, so a kill in between costs nothing."""
        if self._used() + footprint(len(held.live), self.page_bytes) > self._budget:
            return
        header = held.header
        pages = [(row, self._files.read_pages(header, range(row, row + 1))[0]) for row in sorted(held.live)]
        good = [(header.rows[row][0], page) for row, page in pages if self._verifies(header, row, page)]
        self._count("quarantined", len(pages) - len(good))
        self._index.forget(held.id)
        try:
            self._write(good, header.epoch, header.salt_id)
        finally:
            self._files.remove_segment(held.id)

    # --- accounts ------------------------------------------------------------------------------------

    def _count(self, name: str, by: int = 1) -> None:
        with self._count_lock:
            self._counts[name] += by

    def counts(self) -> TierCounts:
        with self._writer, self._count_lock:
            return TierCounts(
                pages=len(self._index), used_bytes=self._used(), budget_bytes=self._budget, **self._counts
            )

    def check_integrity(self) -> None:
        """Index = live rows; every known file has the size that the accounts say; all within the budget."""
        with self._writer:
            self._refresh()
            self._index.check()
            for held in self._index.segments():
                segment = self._files.size(self._files.segment_path(held.id))
                manifest = self._files.size(self._files.manifest_path(held.id))
                if (segment, manifest) != (held.header.segment_bytes, held.manifest_bytes):
                    raise TierIntegrityError(f"NVMe: the files of segment {held.id} have other sizes")
            if (used := self._used()) > self._budget:
                raise TierIntegrityError(f"NVMe: {used} bytes are used of {self._budget}")
