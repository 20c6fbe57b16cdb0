"""A directory of segments: how files come to be, are listed, set aside and removed. No index here.

    nvme_dir/lease               flock: only the holder deletes
    nvme_dir/turn                flock: one process at a time adds
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvtier.errors import FormatError, TierConfigError
from kvtier.fileops import Buffer, Io, file_size, fsync_dir
from kvtier.locks import LOCK_NAMES, DirectoryLocks
from kvtier.quarantine import Quarantine
from kvtier.segment import (
    HEAD_BYTES,
    Header,
    Manifest,
    decode_header,
    decode_manifest,
    encode_header,
    encode_manifest,
    page_count,
    table_bytes,
)

_TEMP: Final = ".tmp"
_MAX_MANIFEST_BYTES: Final = 16 * 2**20


class SegmentFiles:
    """File operations under one directory. OSError passes through, and leaves no half file behind."""

    def __init__(self, root: Path, io: Io, quarantine_bytes: int) -> None:
        self.root, self._io = root, io
        self.quarantine = Quarantine(root / "quarantine", io, quarantine_bytes)
        self._sequence = 0
        self._debris: set[Path] = set()
        self.locks = DirectoryLocks(root, io)
        try:
            self._establish()
        except OSError as error:
            raise TierConfigError(f"the NVMe directory {root} cannot be written: {error.strerror}") from error

    def _establish(self) -> None:
        """Makes the directory and proves that it can be written."""
        self.quarantine.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = self.root / f"probe-{os.getpid()}{_TEMP}"
        self._io.close(self._io.open(probe, os.O_CREAT | os.O_WRONLY))
        self._io.unlink(probe)
        self.locks.open()

    def revive(self) -> bool:
        """Makes the directory anew if it was removed or replaced under us: True then, and nothing known holds."""
        if self.locks.are_current():
            return False
        self._establish()
        return True

    def close(self) -> None:
        self.locks.close()

    def hold_lease(self) -> bool:
        """Whether this process may delete; asks each time, so the lease passes on when its holder dies."""
        return self.locks.hold_lease()

    # --- names ---------------------------------------------------------------------------------------

    def new_id(self) -> str:
        """Sorts by age without a clock: one more than every number seen.

        The random tail spreads over the fan-out and keeps two processes apart.
        """
        self._sequence += 1
        return f"{self._sequence:016x}-{secrets.token_hex(7)}"

    def saw(self, segment_id: str) -> None:
        """A segment that was found: new ones are younger."""
        with contextlib.suppress(ValueError):
            self._sequence = max(self._sequence, int(segment_id.partition("-")[0], 16) % 2**62)

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

    @contextlib.contextmanager
    def scratch(self, chunks: int, chunk_bytes: int) -> Iterator[Path | None]:
        """A file of noise, on the medium and not only in memory; removed at the end. None where it cannot be written.

        It has the name of a half file, so that the next start sweeps what a kill leaves.
        """
        path = self.root / f"speed-{secrets.token_hex(7)}{_TEMP}"
        noise = secrets.token_bytes(chunk_bytes)  # nothing that a file system could leave out or squeeze
        try:
            fd = self._io.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                for chunk in range(chunks):
                    self._io.write_at(fd, [noise], chunk * chunk_bytes)
                self._io.fsync(fd)
            finally:
                self._io.close(fd)
        except OSError:
            yield None
        else:
            yield path
        finally:
            self.remove(path)

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

    # --- listing and removing ------------------------------------------------------------------------

    def fan_out(self) -> list[Path]:
        with os.scandir(self.root) as entries:
            return [self.root / one.name for one in entries if len(one.name) == 2 and one.is_dir()]

    def manifests(self, folder: Path) -> list[Path]:
        return [folder / name for name in os.listdir(folder) if name.endswith(".json")]

    def size(self, path: Path) -> int:
        return file_size(path)

    def remove(self, path: Path) -> bool:
        """Whether it is gone. If not it is debris: its bytes count, and it is tried again."""
        with contextlib.suppress(OSError):
            self._io.unlink(path)
        if path.exists():
            self._debris.add(path)
            return False
        return True

    def remove_segment(self, segment_id: str) -> bool:
        """Manifest first: what is left of an interrupted removal is an orphan that the next start sweeps.

        False where the manifest stays, so that the segment still counts.
        """
        path = self.manifest_path(segment_id)
        with contextlib.suppress(OSError):
            self._io.unlink(path)
        if path.exists():
            return False
        self.remove(self.segment_path(segment_id))
        return True

    def clear_debris(self) -> None:
        """Removes what could not be removed before."""
        for path in list(self._debris):
            self._debris.discard(path)
            self.remove(path)

    def is_debris(self, path: Path) -> bool:
        return path in self._debris

    def debris_bytes(self) -> int:
        return sum(file_size(path) for path in self._debris)

    def sweep(self) -> int:
        """Removes temporary files and segments without a manifest, unless their writer is at work."""
        return sum(self.remove(path) for path in list(self._strays()) if self.is_dead(path))

    def _strays(self) -> Iterator[Path]:
        yield from self.root.glob(f"*{_TEMP}")
        for folder in self.fan_out():
            yield from folder.glob(f"*{_TEMP}")
            for path in folder.glob("*.seg"):
                if not path.with_suffix(".json").exists():
                    yield path

    def all_files(self) -> list[Path]:
        """Everything under the directory but its locks, which are empty."""
        locks = {self.root / name for name in LOCK_NAMES}
        return sorted(path for path in self.root.rglob("*") if path.is_file() and path not in locks)

    def is_dead(self, path: Path) -> bool:
        """Whether no writer is at work on a file that no manifest names."""
        try:
            fd = self._io.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A segment may have got its manifest between the listing and the lock.
            return not (path.suffix == ".seg" and path.with_suffix(".json").exists())
        except OSError:
            return False
        finally:
            self._io.close(fd)

    def set_aside(self, segment_id: str) -> None:
        """Into quarantine with a segment and its manifest, manifest first."""
        self.quarantine.take([self.manifest_path(segment_id), self.segment_path(segment_id)])
