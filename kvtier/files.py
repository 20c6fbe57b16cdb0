"""A directory of segments: how files come to be, are listed, set aside and removed. No index here.

    nvme_dir/lease               flock: only the holder deletes
    nvme_dir/3f/ID.seg, ID.json  fan-out by the last two digits of the id
    nvme_dir/quarantine/         what did not verify, bounded

A file is written under a temporary name, synced, renamed, and its directory synced; the writer holds a
lock on a segment until its manifest exists, so that a sweeper can tell a writer at work from one that died.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvtier.errors import TierConfigError
from kvtier.fileops import Buffer, Io, fsync_dir
from kvtier.segment import (
    HEAD_BYTES,
    FormatError,
    Header,
    Manifest,
    decode_header,
    decode_manifest,
    encode_header,
    encode_manifest,
    page_count,
    table_bytes,
)

QUARANTINE_FILES: Final = 64
_TEMP: Final = ".tmp"
_MAX_MANIFEST_BYTES: Final = 16 * 2**20


class SegmentFiles:
    """File operations under one directory. OSError passes through, and leaves no half file behind."""

    def __init__(self, root: Path, io: Io, quarantine_bytes: int) -> None:
        self.root, self._io, self._quarantine_bytes = root, io, quarantine_bytes
        self._quarantine = root / "quarantine"
        try:
            self._quarantine.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = root / f"probe-{os.getpid()}{_TEMP}"
            io.close(io.open(probe, os.O_CREAT | os.O_WRONLY))
            io.unlink(probe)
            self._lease_fd = io.open(root / "lease", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise TierConfigError(f"the NVMe directory {root} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._io.close(self._lease_fd)

    def hold_lease(self) -> bool:
        """Whether this process may delete; asks each time, so the lease passes on when its holder dies."""
        try:
            fcntl.flock(self._lease_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    # --- names ---------------------------------------------------------------------------------------

    @staticmethod
    def new_id() -> str:
        """Sorts by age; the random tail spreads over the fan-out and keeps two processes apart."""
        return f"{time.time_ns():016x}-{secrets.token_hex(7)}"

    def segment_path(self, segment_id: str) -> Path:
        return self.root / segment_id[-2:] / f"{segment_id}.seg"

    def manifest_path(self, segment_id: str) -> Path:
        return self.root / segment_id[-2:] / f"{segment_id}.json"

    # --- writing -------------------------------------------------------------------------------------

    def write_segment(self, header: Header, payloads: Sequence[Buffer], manifest: Manifest) -> None:
        """All of it durable, or OSError and nothing left."""
        path = self.segment_path(header.segment_id)
        self._make_dir(path.parent)
        temp = path.with_suffix(".seg" + _TEMP)
        fd = self._io.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._io.write_at(fd, [encode_header(header), *payloads], 0)
            self._io.fsync(fd)
            self._io.rename(temp, path)
            fsync_dir(self._io, path.parent)
            self.write_manifest(manifest)
        except BaseException:
            for left in (temp, path, self.manifest_path(header.segment_id)):
                self.remove(left)
            raise
        finally:
            self._io.close(fd)

    def write_manifest(self, manifest: Manifest) -> None:
        path = self.manifest_path(manifest.segment_id)
        temp = path.with_suffix(".json" + _TEMP)
        fd = self._io.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._io.write_at(fd, [encode_manifest(manifest)], 0)
            self._io.fsync(fd)
            self._io.rename(temp, path)
            fsync_dir(self._io, path.parent)
        except BaseException:
            self.remove(temp)
            raise
        finally:
            self._io.close(fd)

    def _make_dir(self, path: Path) -> None:
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)
            fsync_dir(self._io, self.root)

    # --- reading -------------------------------------------------------------------------------------

    def read_manifest(self, path: Path) -> Manifest:
        """FormatError where it is torn, or is not the manifest of the segment that its name says."""
        raw = self._read_all(path)
        try:
            manifest = decode_manifest(raw)
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"not a manifest: {error}") from error
        if manifest.segment_id != path.stem:
            raise FormatError("the manifest belongs to another segment")
        return manifest

    def _read_all(self, path: Path) -> bytes:
        fd = self._io.open(path, os.O_RDONLY)
        try:
            raw = bytearray(min(os.fstat(fd).st_size, _MAX_MANIFEST_BYTES))
            return bytes(raw[: self._io.read_at(fd, [raw], 0)])
        finally:
            self._io.close(fd)

    def read_header(self, manifest: Manifest) -> Header:
        """The segment's table, checked against its manifest, its name and its size."""
        fd = self._io.open(self.segment_path(manifest.segment_id), os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            head = bytearray(HEAD_BYTES)
            self._io.read_at(fd, [head], 0)
            wanted = table_bytes(page_count(bytes(head)))
            if size != manifest.segment_bytes or wanted > size:
                raise FormatError(f"the segment has {size} bytes where its manifest says {manifest.segment_bytes}")
            raw = bytearray(wanted)
            self._io.read_at(fd, [raw], 0)
        finally:
            self._io.close(fd)
        header = decode_header(bytes(raw))
        if header.segment_id != manifest.segment_id or header.segment_bytes != size:
            raise FormatError("the segment's header is another segment's")
        return header

    def read_pages(self, header: Header, rows: range) -> list[bytearray]:
        """Neighbouring payloads in one read; a short file leaves zeros, which will not verify."""
        pages = [bytearray(header.page_bytes) for _ in rows]
        fd = self._io.open(self.segment_path(header.segment_id), os.O_RDONLY)
        try:
            self._io.read_at(fd, pages, header.offset(rows.start))
        finally:
            self._io.close(fd)
        return pages

    # --- listing and removing ------------------------------------------------------------------------

    def fan_out(self) -> list[Path]:
        with os.scandir(self.root) as entries:
            return [self.root / one.name for one in entries if len(one.name) == 2 and one.is_dir()]

    def manifests(self, folder: Path) -> list[Path]:
        return [folder / name for name in os.listdir(folder) if name.endswith(".json")]

    def size(self, path: Path) -> int:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return 0

    def quarantine_size(self) -> int:
        try:
            return sum(self.size(path) for path in self._quarantine.iterdir())
        except OSError:
            return 0

    def remove(self, path: Path) -> bool:
        try:
            self._io.unlink(path)
        except OSError:
            return False
        return True

    def remove_segment(self, segment_id: str) -> None:
        """Manifest first: what is left of an interrupted removal is an orphan that the next start sweeps."""
        with contextlib.suppress(FileNotFoundError):
            self._io.unlink(self.manifest_path(segment_id))
        self.remove(self.segment_path(segment_id))

    def sweep(self) -> int:
        """Removes temporary files and segments without a manifest, unless their writer is at work."""
        return sum(self._remove_if_dead(path) for path in list(self._strays()))

    def _strays(self) -> Iterator[Path]:
        yield from self.root.glob(f"*{_TEMP}")
        for folder in self.fan_out():
            yield from folder.glob(f"*{_TEMP}")
            for path in folder.glob("*.seg"):
                if not path.with_suffix(".json").exists():
                    yield path

    def _remove_if_dead(self, path: Path) -> bool:
        try:
            fd = self._io.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A segment may have got its manifest between the listing and the lock.
            if path.suffix == ".seg" and path.with_suffix(".json").exists():
                return False
            return self.remove(path)
        except OSError:
            return False
        finally:
            self._io.close(fd)

    # --- quarantine ----------------------------------------------------------------------------------

    def set_aside(self, segment_id: str) -> None:
        """Moves a segment and its manifest away, manifest first; removes what cannot be moved."""
        for path in (self.manifest_path(segment_id), self.segment_path(segment_id)):
            try:
                self._io.rename(path, self._quarantine / path.name)
            except OSError:
                self.remove(path)
        self._bound_quarantine()

    def keep_bad_page(self, segment_id: str, row: int, payload: bytearray) -> None:
        """A copy of a page that did not verify, for whoever wants to know why."""
        path = self._quarantine / f"{segment_id}.{row}.page"
        try:
            fd = self._io.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                self._io.write_at(fd, [payload], 0)
            finally:
                self._io.close(fd)
        except OSError:
            self.remove(path)
        self._bound_quarantine()

    def _bound_quarantine(self) -> None:
        """Oldest out first, by number and by bytes."""
        total = self.quarantine_size()
        paths: list[Path] = []
        with contextlib.suppress(OSError):
            paths = sorted(self._quarantine.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        while paths and (len(paths) > QUARANTINE_FILES or total > self._quarantine_bytes):
            oldest = paths.pop(0)
            total -= self.size(oldest)
            self.remove(oldest)
