"""The workspace's files: read, written, scanned and restored without ever leaving their root."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from contextlib import suppress
from typing import Any

from .errors import Refused

DIR_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Key = tuple[int, ...]


class Workspace:
    """Files under one root. No path leaves it and no symbolic link is ever followed."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.cache: dict[Key, str] = {}
        self.unlocked: list[tuple[str, int]] = []  # folders whose mode we changed, outermost first

    def parts(self, path: str) -> list[str]:
        inside = path
        if path == "/work" or path.startswith("/work/"):
            inside = path[6:]
        names = [name for name in inside.split("/") if name not in ("", ".")]
        if inside.startswith("/") or ".." in names or "\0" in inside:
            raise Refused("path", f"{path!r} leaves the workspace; use a path below /work")
        return names

    def open_root(self, flags: int) -> int:
        """The root itself has no mode of its own in a snapshot; a tool that took it away gets it back."""
        if os.stat(self.root).st_mode & 0o700 != 0o700:
            os.chmod(self.root, 0o755)
        return os.open(self.root, flags | os.O_DIRECTORY | os.O_CLOEXEC)

    def open_dir(self, path: str, names: list[str], make: bool = False) -> int:
        fd = self.open_root(os.O_PATH)
        for name in names:
            try:
                try:
                    below_fd = os.open(name, DIR_FLAGS, dir_fd=fd)
                except FileNotFoundError:
                    if not make:
                        raise
                    os.mkdir(name, 0o755, dir_fd=fd)
                    below_fd = os.open(name, DIR_FLAGS, dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    raise Refused("path", f"{path!r} goes through {name!r}, which is not a directory") from None
                raise
            finally:
                os.close(fd)
            fd = below_fd
        return fd

    def parent(self, path: str, make: bool = False) -> tuple[int, str]:
        names = self.parts(path)
        if not names:
            raise Refused("path", f"{path!r} names the workspace itself, not something in it")
        return self.open_dir(path, names[:-1], make), names[-1]

    def open_file(self, path: str) -> int:
        fd, name = self.parent(path)
        try:
            return open_regular(fd, name, path)
        finally:
            os.close(fd)

    def scan(self, mapped: set[int]) -> list[Any]:
        """The tree as nested lists: [name, "f", mode, hash, size], [name, "d", mode, entries], [name, "l", target].

        Folders that deny us are opened, so that what is in them can be read next; `relock` closes them again.
        """
        fresh: dict[Key, str] = {}
        fd = self.open_root(os.O_RDONLY)
        try:
            return self._scan(fd, "", 0, fresh, mapped)
        finally:
            os.close(fd)
            self.cache = fresh

    def _scan(self, fd: int, path: str, depth: int, fresh: dict[Key, str], mapped: set[int]) -> list[Any]:
        if depth > 200:
            raise Refused("path", "the workspace is nested deeper than 200 directories")
        entries: list[Any] = []
        for name in sorted(os.listdir(fd)):
            st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            mode, where = st.st_mode & 0o777, path + name
            if stat.S_ISLNK(st.st_mode):
                entries.append([name, "l", os.readlink(name, dir_fd=fd)])
            elif stat.S_ISDIR(st.st_mode):
                if mode & 0o700 != 0o700:
                    os.chmod(name, mode | 0o700, dir_fd=fd)
                    self.unlocked.append((where, mode))
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                try:
                    entries.append([name, "d", mode, self._scan(inner, where + "/", depth + 1, fresh, mapped)])
                finally:
                    os.close(inner)
            elif stat.S_ISREG(st.st_mode):
                key = (st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
                digest = self.cache.get(key) or self._hash(fd, name, mode)
                entries.append([name, "f", mode, digest, st.st_size])
                # A change within one clock tick of this stat would look the same: only settled files are remembered.
                if st.st_ino not in mapped and time.time_ns() - st.st_ctime_ns > 50_000_000:
                    fresh[key] = digest
            else:
                entries.append([name, "o"])
        return entries

    @staticmethod
    def _hash(fd: int, name: str, mode: int) -> str:
        digest = hashlib.sha256()
        file = opened(fd, name, mode, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            while True:
                piece = os.read(file, 1 << 20)
                if not piece:
                    return digest.hexdigest()
                digest.update(piece)
        finally:
            os.close(file)

    def remove_at(self, fd: int, name: str) -> None:
        """Removes a file or a whole tree, however deep: its folders are moved to the root and emptied one by one."""
        try:
            os.unlink(name, dir_fd=fd)
            return
        except IsADirectoryError:
            pass
        root = self.open_root(os.O_PATH)
        try:
            todo = [self._move_out(fd, name, root)]
            while todo:
                folder = todo.pop()
                inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
                try:
                    for child in os.listdir(inner):
                        try:
                            os.unlink(child, dir_fd=inner)
                        except IsADirectoryError:
                            todo.append(self._move_out(inner, child, root))
                finally:
                    os.close(inner)
                os.rmdir(folder, dir_fd=root)
        finally:
            os.close(root)

    @staticmethod
    def _move_out(fd: int, name: str, root: int) -> str:
        os.chmod(name, 0o700, dir_fd=fd)
        temporary = f".{os.urandom(8).hex()}.removed"
        os.rename(name, temporary, src_dir_fd=fd, dst_dir_fd=root)
        return temporary

    def relock(self) -> None:
        unlocked, self.unlocked = self.unlocked, []
        for path, mode in reversed(unlocked):
            with suppress(OSError, Refused):
                fd, name = self.parent(path)
                try:
                    os.chmod(name, mode, dir_fd=fd)
                finally:
                    os.close(fd)

    def apply(self, step: list[Any], body: memoryview) -> None:
        """One step of a restore; the processes are gone by then, so nothing moves under our feet."""
        kind, path = step[0], step[1]
        fd, name = self.parent(path)
        try:
            if kind == "rm":
                self.remove_at(fd, name)
            elif kind == "dir":
                os.mkdir(name, 0o700, dir_fd=fd)
            elif kind == "link":
                os.symlink(step[2], name, dir_fd=fd)
            elif kind == "mode":
                os.chmod(name, step[2], dir_fd=fd)
            elif kind == "file":
                file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=fd)
                write_all(file, body)
                os.fchmod(file, step[2])
                os.close(file)
            else:
                raise Refused("request", f"unknown step {kind!r}")
        finally:
            os.close(fd)


def opened(fd: int, name: str, mode: int, flags: int) -> int:
    """Opens what we own even where its mode denies it, and leaves the mode as it was."""
    try:
        return os.open(name, flags | os.O_CLOEXEC, dir_fd=fd)
    except PermissionError:
        os.chmod(name, mode | 0o500, dir_fd=fd)
        try:
            return os.open(name, flags | os.O_CLOEXEC, dir_fd=fd)
        finally:
            os.chmod(name, mode, dir_fd=fd)


def open_regular(fd: int, name: str, path: str) -> int:
    mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
    if not stat.S_ISREG(mode):
        raise Refused("path", f"{path!r} is not a regular file; links and special files are not followed")
    return opened(fd, name, mode & 0o777, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def write_all(fd: int, body: memoryview) -> None:
    while body:
        body = body[os.write(fd, body) :]
