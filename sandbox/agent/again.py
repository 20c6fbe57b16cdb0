"""Looking at the workspace again: only at what the watch says was touched, or could not have seen.

The folders must be those of the last look: where one came, went or moved, all are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from operator import itemgetter

from .errors import Refused
from .scan import NOTHING, OPEN_FOLDER, Folder, Scan, as_seen
from .watch import Names, Watch
from .workspace import Workspace


class Doubt(Exception):
    """The whole workspace must be looked at."""


class Again(Scan):
    """A scan that opens no folder without reason. What was seen before stays as it is, for whoever looks after a doubt.

    `linked`: inodes that had more than one name before. Raises Doubt.
    """

    def __init__(
        self, workspace: Workspace, before: dict[str, Folder], mapped: set[int] | None, watch: Watch,
        touched: Mapping[int, Names], held: set[int] | None, linked: set[int],
    ) -> None:  # fmt: skip
        self.linked = linked
        super().__init__(workspace, before, mapped, False, watch, touched, held)

    def _walk(self) -> list[Folder]:
        """In the order of a whole scan: of a file's names, the first there is the one that holds its content."""
        order: list[Folder] = []
        todo: list[tuple[Folder | None, str, Folder, bool]] = [(None, "", self.before[""], False)]
        while todo:
            parent, name, old, attributes = todo.pop()
            folder = old.again(parent)
            if parent is not None:
                parent.folders[name] = folder
            order.append(folder)
            names = self._renew(folder, old, attributes)
            for entry in reversed(folder.entries) if old.folders or folder.changed else ():
                if entry[1] == "d":
                    touched = entry[0] in names
                    if entry[0] not in old.folders or (touched and entry[2] & 0o700 != 0o700):
                        raise Doubt
                    todo.append((folder, entry[0], old.folders[entry[0]], touched))
        if not self.linked.issuperset(self.first):
            raise Doubt  # the other name may be anywhere
        return order

    def _renew(self, folder: Folder, old: Folder, attributes: bool) -> Names:
        """Makes the copy of a folder what the folder is now; returns the names in it that were touched."""
        if self.touched is None or old.number not in self.watch.alive:
            raise Doubt
        names, sure = self.touched.get(old.number, set()), self.sure(old)
        if sure and not names and not attributes:
            return names
        fd = self._open(old)
        try:
            if attributes:
                folder.xattrs = self._xattrs(fd, 0o700, old.path[:-1])
            if names or not sure:
                folder.files, folder.entries, folder.others, folder.changed = {}, [], [], True
            if not sure:
                self._look(fd, folder)
            elif names:
                self._patch(fd, folder, old, names)
        finally:
            os.close(fd)
        return names

    def _open(self, folder: Folder) -> int:
        place = self.workspace.open_dir(folder.path, folder.path.split("/")[:-1])
        try:
            fd = os.open(".", OPEN_FOLDER, dir_fd=place)
        finally:
            os.close(place)
        st = os.fstat(fd)
        if (st.st_dev, st.st_ino) != folder.identity:
            os.close(fd)
            raise Doubt
        return fd

    def _patch(self, fd: int, folder: Folder, old: Folder, names: Names) -> None:
        found = []
        for name in sorted(names):
            with suppress(FileNotFoundError):
                found.append(as_seen(name, os.stat(name, dir_fd=fd, follow_symlinks=False)))
        self._list(fd, folder, found, {})
        folder.seen = sorted([each for each in old.seen if each[0] not in names] + found)
        kept = [entry for entry in old.entries if entry[0] not in names]
        folder.entries = sorted(kept + folder.entries, key=itemgetter(0))
        folder.files.update({name: old.files[name] for name in old.files.keys() - names})
        gone = {folder.path + name for name in names}
        folder.others = sorted([path for path in old.others if path not in gone] + folder.others)
        folder.settled = folder.settled and old.settled


class Memory:
    """What the last look saw, and the watch since."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.watch = Watch()
        self.folders: dict[str, Folder] = {}
        self.held: set[int] | None = None
        self.linked: set[int] = set()

    def look(self, mapped: set[int] | None, held: set[int] | None, verify: bool) -> Scan:
        """`held`: inodes that somebody has open, and may write to by a name that no folder knows."""
        self.workspace.relock()
        watched = self.watch.fd >= 0
        touched = self.watch.touched() if watched else NOTHING
        held = None if mapped is None or held is None else mapped | held
        doubtful = None if not watched or self.watch.unsure or held is None or self.held is None else held | self.held
        before, self.folders = self.folders, {}  # where this look fails, the next trusts nothing
        if mapped is not None and touched:
            mapped = mapped | self._by_another_name(before, touched)
        scan: Scan | None = None
        if before and touched is not None and doubtful is not None and not verify:
            with suppress(Doubt, OSError, Refused):
                scan = Again(self.workspace, before, mapped, self.watch, touched, doubtful, self.linked)
        if scan is None:
            self.workspace.relock()
            self.watch.start()
            scan = Scan(self.workspace, before, mapped, verify, self.watch, touched, doubtful)
        self.folders = {folder.path: folder for folder in scan.folders}
        self.linked = set(scan.first)
        self.held = None if scan.left_out or self.workspace.unlocked else held
        return scan

    def _by_another_name(self, before: dict[str, Folder], touched: Mapping[int, Names]) -> set[int]:
        """Inodes with more names than the one that was touched."""
        if not self.linked:
            return set()
        changed = [(folder, touched[folder.number]) for folder in before.values() if folder.number in touched]
        return {each[2] for folder, names in changed for each in folder.seen if each[6] > 1 and each[0] in names}
