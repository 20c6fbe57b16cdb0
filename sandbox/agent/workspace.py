"""The workspace's files: read, written and restored without ever leaving their root."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Any

from .errors import Refused

DIR_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MODES = 0o1777  # no setuid and setgid: the workspace is mounted nosuid, where they mean nothing
PAGE = 4096
ZEROS = bytes(PAGE)


class Workspace:
    """Files under one root. No path leaves it and no symbolic link is ever followed."""

    def __init__(self, root: str) -> None:
        self.root = root
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
        return self.open_below(self.open_root(os.O_PATH), path, names, make)

    @staticmethod
    def open_below(fd: int, path: str, names: list[str], make: bool = False) -> int:
        """From a folder that is open, which is closed."""
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

    def apply(self, fd: int, name: str, step: list[Any], body: memoryview) -> bool:
        """One step of a restore below an open folder; the processes are gone, so nothing moves under our feet.

        False where the file system has no extended attributes.
        """
        kind = step[0]
        if kind == "rm":
            self.remove_at(fd, name)
        elif kind == "dir":
            os.mkdir(name, 0o700, dir_fd=fd)
        elif kind == "link":
            os.symlink(step[2], name, dir_fd=fd)
        elif kind == "hard":
            source, first = self.parent(step[2])
            try:
                os.link(first, name, src_dir_fd=source, dst_dir_fd=fd, follow_symlinks=False)
            finally:
                os.close(source)
        elif kind == "mode":
            os.chmod(name, step[2] & MODES, dir_fd=fd)
        elif kind == "file":
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(name, flags, 0o600, dir_fd=fd)
            try:
                write_filled(file, body, 0)
                os.fchmod(file, step[2] & MODES)
            finally:
                os.close(file)
        elif kind in ("more", "xattrs"):
            return self._change(fd, name, step, body)
        else:
            raise Refused("request", f"unknown step {kind!r}")
        return True

    @staticmethod
    def _change(fd: int, name: str, step: list[Any], body: memoryview) -> bool:
        """Steps on what is there already, whatever its mode allows."""
        mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
        os.chmod(name, stat.S_IMODE(mode) | 0o700, dir_fd=fd)
        access = os.O_WRONLY if step[0] == "more" else os.O_RDONLY
        file = os.open(name, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        try:
            if step[0] == "more":
                write_filled(file, body, step[2])
            else:
                set_xattrs(file, step[2])
            return True
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            return False
        finally:
            os.fchmod(file, stat.S_IMODE(mode))
            os.close(file)


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


def write_filled(fd: int, body: memoryview, at: int) -> None:
    """Writes from an offset on, and leaves holes where pages are zero: a file takes no more room than it did."""
    end, dense = at + len(body), ZEROS not in bytes(body)
    while body:
        piece = body if dense else body[:PAGE]
        if dense or piece != ZEROS[: len(piece)]:
            piece = piece[: os.pwrite(fd, piece, at)]
        body, at = body[len(piece) :], at + len(piece)
    if os.fstat(fd).st_size < end:
        os.ftruncate(fd, end)


def set_xattrs(fd: int, wanted: dict[str, str]) -> None:
    """Exactly these of the user's own, values in hex."""
    for name in os.listxattr(fd):
        if name.startswith("user.") and name not in wanted:
            os.removexattr(fd, name)
    for name, value in wanted.items():
        os.setxattr(fd, name, bytes.fromhex(value))
