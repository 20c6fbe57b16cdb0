"""The workspace as content-addressed folders: all of it looked at, what changed read and hashed.

A folder's blob is what `sandbox.snapshots` describes; its hash is over those bytes. A folder whose entries all look as
they did before (inode, size, mtime, ctime) keeps its hash without a file being opened; what a watch says was touched is
read all the same, as writes through a mapping change none of these.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any

from .content import hashed
from .errors import Refused
from .watch import Names, Watch
from .workspace import MODES, Workspace, opened

MAX_PATH = 4000  # bytes below the root: what lies deeper has no path that a tool could name
SETTLED_NS = 50_000_000
MAX_XATTRS = 64 << 10
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Seen = tuple[str, int, int, int, int, int, int]  # name, mode, inode, size, mtime, ctime, links
Entry = list[Any]
NOTHING: dict[int, Names] = {}


class Folder:
    """One folder of a scan: its entries, as its blob has them, and what makes looking again cheap."""

    def __init__(self, parent: Folder | None, path: str, xattrs: dict[str, str]) -> None:
        self.parent = parent
        self.path = path  # "" or ending with "/"
        self.xattrs = xattrs
        self.identity = (0, 0)
        self.number = 0  # the watch's
        self.seen: list[Seen] = []
        self.settled = False  # the next look may compare what it sees with this one
        self.calm = False  # whoever changes something in here is seen by the watch
        self.files: dict[str, tuple[Seen, Entry]] = {}
        self.entries: list[Entry] = []
        self.others: list[str] = []  # sockets, pipes, and what lies too deep: in no snapshot
        self.folders: dict[str, Folder] = {}
        self.changed = True
        self.digest = self.before = ""
        self.text = b""  # the blob, where this look had to make it

    def again(self, parent: Folder | None) -> Folder:
        """The same folder at the next look, as long as nothing else is seen."""
        same = Folder.__new__(Folder)
        same.__dict__.update(self.__dict__)
        same.parent, same.folders, same.before, same.changed, same.text = parent, {}, self.digest, False, b""
        return same

    def blob(self) -> bytes:
        return self.text or json.dumps(self.entries, separators=(",", ":")).encode()


class Scan:
    """One look at the workspace. `mapped`: inodes that somebody may change unseen; None: any may be.

    `touched` is what the watch said; None where it had to say something and could not, so that all is read. `held`:
    inodes whose changes the watch may have missed; None: any may be. Folders that deny us are opened, so that what is
    in them can be read next; `relock` closes them again.
    """

    def __init__(
        self,
        workspace: Workspace,
        before: dict[str, Folder],
        mapped: set[int] | None,
        verify: bool,
        watch: Watch | None = None,
        touched: Mapping[int, Names] | None = NOTHING,
        held: set[int] | None = None,
    ) -> None:
        self.workspace = workspace
        self.before = before
        self.mapped = mapped
        self.verify = verify
        self.watch = watch or Watch()
        self.touched = touched
        self.held = held
        self.now = time.time_ns()
        self.first: dict[int, str] = {}  # inode with more than one name -> the first of them
        self.left_out: list[tuple[str, str]] = []
        self.stale: list[str] = []
        self.xattrs = True  # until the file system says that it has none
        self.folders = self._walk()  # parents first
        for folder in reversed(self.folders):
            self._name(folder)
        self.root = self.folders[0].digest

    def _walk(self) -> list[Folder]:
        return self._below(self.workspace.open_root(os.O_RDONLY), Folder(None, "", {}))

    def _below(self, fd: int, top: Folder) -> list[Folder]:
        """An open folder, which is closed, and all in it.

        Depth first with one open folder at a time, so that no depth is too deep.
        """
        here = top
        order, todo = [here], [(here, self._look(fd, here))]
        try:
            while todo:
                here, below = todo[-1]
                if below:
                    name, mode = below.pop()
                    inner = self._enter(fd, here.path + name, name, mode)
                    os.close(fd)
                    fd = inner
                    path = here.path + name
                    folder = here.folders[name] = Folder(here, path + "/", self._xattrs(fd, mode | 0o700, path))
                    order.append(folder)
                    todo.append((folder, self._look(fd, folder)))
                elif todo.pop() and here is not top and here.parent is not None:
                    fd = self._leave(fd, here.parent)
        finally:
            os.close(fd)
        return order

    def _enter(self, fd: int, path: str, name: str, mode: int) -> int:
        if mode & 0o700 != 0o700:
            os.chmod(name, mode | 0o700, dir_fd=fd)
            self.workspace.unlocked.append((path, mode))
        return os.open(name, OPEN_FOLDER, dir_fd=fd)

    @staticmethod
    def _leave(fd: int, parent: Folder) -> int:
        above = os.open("..", OPEN_FOLDER, dir_fd=fd)
        st = os.fstat(above)
        if (st.st_dev, st.st_ino) != parent.identity:
            os.close(above)
            raise Refused("os", f"the folder {parent.path!r} moved while the workspace was read")
        os.close(fd)
        return above

    def _look(self, fd: int, folder: Folder) -> list[tuple[str, int]]:
        """Fills in the folder's entries; returns the folders in it, last one first."""
        st = os.fstat(fd)
        folder.identity = (st.st_dev, st.st_ino)
        folder.number = self.watch.add(fd)
        with os.scandir(fd) as found:
            seen = [as_seen(each.name, each.stat(follow_symlinks=False)) for each in found]
        seen.sort()
        old = self.before.get(folder.path)
        folder.before = old.digest if old is not None else ""
        if old is None or old.identity != folder.identity or self.touched is None:
            self._list(fd, folder, seen, {})
            return self._folders_in(folder)
        names = self.touched.get(old.number, set())
        if not names and old.settled and old.seen == seen and not self.verify and not self._may_change(seen):
            folder.seen, folder.files, folder.entries, folder.others = seen, old.files, old.entries, old.others
            folder.changed, folder.digest, folder.settled, folder.calm = False, old.digest, True, old.calm
        else:
            known = {name: old.files[name] for name in old.files.keys() - names}
            if self.verify and self.sure(old):
                there = {entry[0]: entry for entry in old.entries if entry[0] not in names}
                known.update({each[0]: (each, there[each[0]]) for each in seen if each[0] in there})
            self._list(fd, folder, seen, known)
        return self._folders_in(folder)

    @staticmethod
    def _folders_in(folder: Folder) -> list[tuple[str, int]]:
        return [(entry[0], entry[2]) for entry in reversed(folder.entries) if entry[1] == "d"]

    def sure(self, old: Folder) -> bool:
        """Whether the watch would have seen any change in there."""
        if not old.calm or not self.held:
            return old.calm and self.held is not None
        return self.held.isdisjoint(each[2] for each in old.seen)

    def _may_change(self, seen: list[Seen]) -> bool:
        if not self.mapped:
            return self.mapped is None
        return not self.mapped.isdisjoint(each[2] for each in seen)

    def _list(self, fd: int, folder: Folder, seen: list[Seen], known: dict[str, tuple[Seen, Entry]]) -> None:
        room = MAX_PATH - len(os.fsencode(folder.path))
        folder.seen, folder.settled, folder.calm = seen, True, True
        for each in seen:
            name, mode = each[0], each[1] & MODES
            if len(os.fsencode(name)) > room:
                folder.others.append(folder.path + name)
                self.left_out.append((folder.path + name, f"its path is longer than {MAX_PATH} bytes"))
                folder.settled = folder.calm = False
            elif stat.S_ISREG(each[1]):
                entry = self._file(fd, folder.path, each, known.get(name))
                # A change within one clock tick of this look would look the same: only settled files are remembered.
                settled = self.now - each[5] > SETTLED_NS and self.mapped is not None and each[2] not in self.mapped
                if settled:
                    folder.files[name] = each, entry
                if each[6] > 1 and self.first.setdefault(each[2], folder.path + name) != folder.path + name:
                    entry = [name, "h", self.first[each[2]]]
                folder.calm = folder.calm and each[6] == 1
                folder.settled = folder.settled and settled and each[6] == 1
                folder.entries.append(entry)
            elif stat.S_ISDIR(each[1]):
                folder.entries.append([name, "d", mode, ""])
            elif stat.S_ISLNK(each[1]):
                folder.entries.append([name, "l", os.readlink(name, dir_fd=fd)])
            else:
                folder.others.append(folder.path + name)

    def _file(self, fd: int, path: str, each: Seen, known: tuple[Seen, Entry] | None) -> Entry:
        name, mode, unseen = each[0], each[1] & MODES, self.mapped is None or each[2] in self.mapped
        kept = known[1] if known is not None and known[0] == each and not unseen else None
        if kept is not None and not self.verify:
            return kept
        file = opened(fd, name, mode, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            kind, digest = hashed(file, each[3])
            entry = [name, kind, mode, digest, each[3]]
            xattrs = self._xattrs(file, mode, path + name)
        finally:
            os.close(file)
        if xattrs:
            entry.append(xattrs)
        if kept is not None and kept != entry:
            self.stale.append(path + name)
        return entry

    def _xattrs(self, fd: int, mode: int, path: str) -> dict[str, str]:
        """Those of the user's own; what the system or security modules attach is not the tools' to keep."""
        if not self.xattrs:
            return {}
        try:
            names = sorted(name for name in os.listxattr(fd) if name.startswith("user."))
            if not names:
                return {}
            if not mode & 0o400:
                os.fchmod(fd, mode | 0o400)
            values = {name: os.getxattr(fd, name).hex() for name in names}
            if not mode & 0o400:
                os.fchmod(fd, mode)
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            self.xattrs = False
            return {}
        if sum(map(len, values.values())) > 2 * MAX_XATTRS:
            self.left_out.append((path, f"its extended attributes are more than {MAX_XATTRS} bytes"))
            return {}
        return values

    @staticmethod
    def _name(folder: Folder) -> None:
        for entry in folder.entries if folder.folders else ():
            if entry[1] == "d":
                below = folder.folders[entry[0]]
                found = [below.digest, below.xattrs] if below.xattrs else [below.digest]
                folder.changed = folder.changed or entry[3:] != found
                entry[3:] = found
        if folder.changed:
            folder.text = folder.blob()
            folder.digest = hashlib.sha256(folder.text).hexdigest()


def as_seen(name: str, st: os.stat_result) -> Seen:
    return name, st.st_mode, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_nlink


def walk(todo: list[Folder]) -> Iterator[Folder]:
    while todo:
        folder = todo.pop()
        yield folder
        todo += reversed(list(folder.folders.values()))
