"""What lies in the NVMe directory: found at the start, and again whenever another process may have changed it."""

from __future__ import annotations

from pathlib import Path

from kvtier.codec import Codec
from kvtier.counts import Tally
from kvtier.errors import ForeignError, FormatError
from kvtier.files import SegmentFiles
from kvtier.index import Held, SegmentIndex
from kvtier.segment import table_digest


class Census:
    """Keeps an index true to a directory. Under the store's writer lock."""

    def __init__(
        self,
        files: SegmentFiles,
        index: SegmentIndex,
        layout: bytes,
        codec: Codec,
        tally: Tally,
    ) -> None:
        self._files, self._index, self._layout, self._codec, self._tally = files, index, layout, codec, tally
        self._folders: dict[Path, int] = {}
        self._unread: set[Path] = set()  # manifests of what the disk would not let us read; their bytes count
        self._locked: set[Path] = set()  # manifests of what needs a key that is not here; their bytes count

    def revive(self) -> None:
        """A directory that was removed under us is made anew, and what it held is gone. May raise OSError."""
        if self._files.revive():
            self._tally.add("recreated")
            self._index.clear()
            self._folders.clear()

    def refresh(self) -> list[Held]:
        """`scan`, but one that may fail: then what is known stands."""
        try:
            self.revive()
            return self.scan()
        except OSError:
            self._tally.add("io_errors")
            return []

    def scan(self) -> list[Held]:
        """Segments that other processes wrote, in the folders whose times changed, oldest first.

        The caller enters them. What others removed is forgotten.
        """
        for path in self._unread:
            self._index.forget(path.stem)
            self._folders.pop(path.parent, None)
        self._unread.clear()
        found: dict[str, Path] = {}
        folders = self._files.fan_out()
        for suffix in self._index.suffixes() - {folder.name for folder in folders}:
            self._forget_all(suffix)
        self._folders = {folder: self._folders[folder] for folder in folders if folder in self._folders}
        for folder in folders:
            changed = folder.stat().st_mtime_ns  # compared for being another one, never for being later
            if self._folders.get(folder) == changed:
                continue
            self._folders[folder] = changed
            paths = {path.stem: path for path in self._files.manifests(folder) if not self._files.is_debris(path)}
            known = self._index.known(folder.name)
            for segment_id in known - paths.keys():
                self._index.forget(segment_id)
            found |= {segment_id: paths[segment_id] for segment_id in paths.keys() - known}
        return [held for segment_id in sorted(found) if (held := self._admit(found[segment_id])) is not None]

    def lock(self, path: Path) -> None:
        """The segment of this manifest needs a key that is not here."""
        self._locked.add(path)

    def locked(self) -> set[str]:
        """Ids of segments that need a key."""
        return {path.stem for path in self._locked}

    def unlock(self) -> bool:
        """There are new keys: what was locked is inspected again at the next scan. False where nothing was."""
        self._unread |= self._locked
        self._locked.clear()
        return bool(self._unread)

    def _forget_all(self, suffix: str) -> None:
        for segment_id in self._index.known(suffix):
            self._index.forget(segment_id)

    def _admit(self, path: Path) -> Held | None:
        """A segment found on disk: whole and ours, or counted as foreign, or set aside."""
        self._files.saw(path.stem)
        try:
            return self._inspect(path)
        except (FileNotFoundError, FormatError):
            if path.exists():  # else another process removed both meanwhile
                self._tally.add("quarantined")
                if self._files.hold_lease():
                    self._files.set_aside(path.stem)
        except ForeignError:
            self._set_foreign(path, "foreign")
        except OSError:
            self._unread.add(path)
            self._set_foreign(path, "io_errors")
        return None

    def _inspect(self, path: Path) -> Held | None:
        manifest = self._files.read_manifest(path)
        if manifest.layout != self._layout:
            raise ForeignError("another model or layout")
        header = self._files.read_header(manifest)
        if table_digest(header) != manifest.table or header.layout != self._layout:
            raise FormatError("the table is not the one that the manifest names")
        if not manifest.live <= set(range(len(header.rows))):
            raise FormatError("the manifest names pages that the segment does not have")
        if not self._codec.readable(header.form, header.salt_id):
            self.lock(path)
            self._set_foreign(path, "undecodable")
            return None
        return Held(header, set(manifest.live), self._files.size(path))

    def _set_foreign(self, path: Path, why: str) -> None:
        """Missing, but its bytes count, and it is the first to go."""
        self._tally.add(why)
        segment = self._files.segment_path(path.stem)
        self._index.add_foreign(path.stem, self._files.size(path) + self._files.size(segment))
