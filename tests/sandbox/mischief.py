"""Whatever a tool may do to the files of a workspace, one thing at a time and at random."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, AT_SYMLINK_FOLLOW, RENAME_EXCHANGE = -100, 0x400, 2
NAMES = "abcde"


def tie(fd: int, path: Path) -> None:
    """A name for an open file that has none."""
    if LIBC.linkat(AT_FDCWD, b"/proc/self/fd/%d" % fd, AT_FDCWD, os.fsencode(path), AT_SYMLINK_FOLLOW):
        raise OSError(ctypes.get_errno(), "linkat")


def exchange(one: Path, other: Path) -> None:
    if LIBC.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), "renameat2")


def change_in_place(path: Path, byte: bytes) -> None:
    """Through a mapping that is read first, on a tmpfs: no time of the file changes."""
    with open(path, "r+b") as f, mmap.mmap(f.fileno(), 0) as window:
        window[0:1] = byte if window[0:1] != byte else b"!"


class Mischief:
    """`held` and `mapped` are the inodes that this tool has open and mapped, as /proc would tell."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.files: list[int] = []
        self.windows: list[tuple[int, mmap.mmap]] = []
        self.done: list[str] = []
        for folder in ("a/a/a", "a/b", "b/a", "c"):
            (root / folder).mkdir(parents=True)
        for path in [root / "e", *(root / folder / name for folder in ("a", "a/b", "b/a", "c") for name in "cde")]:
            path.write_bytes(self.content())

    def held(self) -> set[int]:
        return {os.fstat(fd).st_ino for fd in self.files}

    def mapped(self) -> set[int]:
        return {inode for inode, _ in self.windows}

    def content(self) -> bytes:
        return self.random.randbytes(self.random.choice([0, 1, 10, 5000]))

    def folder(self) -> Path:
        return self.random.choice([self.root, *(path for path in sorted(self.root.rglob("*")) if is_folder(path))])

    def file(self) -> Path:
        found = [path for path in sorted(self.root.rglob("*")) if path.is_file() and not path.is_symlink()]
        return self.random.choice(found) if found else self.root / "none"

    def any(self) -> Path:
        return self.folder() / self.random.choice(NAMES)

    def target(self) -> Path:
        """What may be opened without waiting for somebody at the other end."""
        path = self.any()
        return self.file() if path.is_fifo() else path

    def act(self) -> None:
        """One thing; what cannot be done here and now is not."""
        name = self.random.choice([name for name in dir(Mischief) if name.startswith("do_")])
        self.done.append(name[3:])
        do: Callable[[], None] = getattr(self, name)
        with suppress(OSError, ValueError, shutil.Error):
            do()

    def end(self) -> None:
        for fd in self.files:
            os.close(fd)
        for _, window in self.windows:
            window.close()
        self.files, self.windows = [], []

    def do_write(self) -> None:
        self.target().write_bytes(self.content())

    def do_write_and_set_the_time_back(self) -> None:
        path = self.file()
        st = path.stat()
        path.write_bytes(self.random.randbytes(st.st_size))
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))

    def do_append(self) -> None:
        with open(self.file(), "ab") as f:
            f.write(b"more")

    def do_truncate(self) -> None:
        os.truncate(self.file(), self.random.choice([0, 3, 9000]))

    def do_allocate(self) -> None:
        with open(self.file(), "r+b") as f:
            os.posix_fallocate(f.fileno(), 0, 7000)

    def do_copy_in_the_kernel(self) -> None:
        with open(self.file(), "rb") as source, open(self.target(), "wb") as f:
            how = self.random.randrange(3)
            if how == 0:
                os.copy_file_range(source.fileno(), f.fileno(), 4000)
            elif how == 1:
                os.sendfile(f.fileno(), source.fileno(), 0, 4000)
            else:
                near, far = os.pipe()
                os.write(far, b"through a pipe %d" % self.random.randrange(99))
                os.close(far)
                splice(near, f.fileno(), 4000)
                os.close(near)

    def do_map_and_forget(self) -> None:
        change_in_place(self.file(), self.random.randbytes(1))

    def do_map(self) -> None:
        with open(self.file(), "r+b") as f:
            self.windows.append((os.fstat(f.fileno()).st_ino, mmap.mmap(f.fileno(), 0)))

    def do_write_mapped(self) -> None:
        whole = [window for _, window in self.windows if window.size()]  # the others have no page to write to
        if whole:
            self.random.choice(whole)[0:1] = self.random.randbytes(1)

    def do_unmap(self) -> None:
        if self.windows:
            self.windows.pop(self.random.randrange(len(self.windows)))[1].close()

    def do_open(self) -> None:
        self.files.append(os.open(self.file(), os.O_RDWR))

    def do_open_without_a_name(self) -> None:
        self.files.append(os.open(self.folder(), os.O_RDWR | os.O_TMPFILE, 0o644))

    def do_name_what_is_open(self) -> None:
        if self.files:
            tie(self.random.choice(self.files), self.any())

    def do_write_what_is_open(self) -> None:
        if self.files:
            os.pwrite(self.random.choice(self.files), self.random.randbytes(6), 0)

    def do_open_again_what_is_open(self) -> None:
        if self.files:
            fd = os.open(f"/proc/self/fd/{self.random.choice(self.files)}", os.O_RDWR)
            os.pwrite(fd, self.random.randbytes(4), 1)
            os.close(fd)

    def do_close(self) -> None:
        if self.files:
            os.close(self.files.pop(self.random.randrange(len(self.files))))

    def do_move_by_another_name(self) -> None:
        """What is open is then written to by a name that is gone."""
        path, other = self.file(), self.any()
        fd = os.open(path, os.O_RDWR)
        self.files.append(fd)
        os.link(path, other)
        path.unlink()

    def do_link(self) -> None:
        os.link(self.file(), self.any())

    def do_write_by_a_passing_name(self) -> None:
        """Another name of a file comes, is written to, and goes: by itself or under what is moved there."""
        other = self.any()
        os.link(self.file(), other)
        self.change(other)
        if self.random.random() < 0.5:
            other.unlink()
        else:
            self.file().rename(other)

    def do_write_by_a_name_in_a_new_folder(self) -> None:
        """Of which nobody is told; it may be gone too."""
        folder = self.any()
        folder.mkdir()
        other = folder / "x"
        os.link(self.file(), other)
        self.change(other)
        other.unlink()
        if self.random.random() < 0.5:
            folder.rmdir()

    def change(self, path: Path) -> None:
        if self.random.random() < 0.5:
            change_in_place(path, self.random.randbytes(1))
        else:
            path.write_bytes(self.content())

    def do_symlink(self) -> None:
        os.symlink(self.random.choice(NAMES), self.any())

    def do_pipe(self) -> None:
        os.mkfifo(self.any())

    def do_unlink(self) -> None:
        self.any().unlink()

    def do_rename(self) -> None:
        self.any().rename(self.any())

    def do_rename_a_folder(self) -> None:
        self.folder().rename(self.any())

    def do_exchange(self) -> None:
        exchange(self.any(), self.any())

    def do_make_a_folder(self) -> None:
        (self.any() / "a").mkdir(parents=True)

    def do_replace_a_folder(self) -> None:
        folder = self.folder()
        if folder != self.root:
            shutil.rmtree(folder)
            folder.mkdir()
            (folder / self.random.choice(NAMES)).write_bytes(self.content())

    def do_remove_a_folder(self) -> None:
        folder = self.folder()
        if folder != self.root and self.random.random() < 0.3:
            shutil.rmtree(folder)

    def do_move_away_and_back(self) -> None:
        folder = self.folder()
        if folder != self.root:
            away = self.root / "away"
            folder.rename(away)
            self.do_write()
            away.rename(folder)

    def do_chmod(self) -> None:
        self.file().chmod(self.random.choice([0o600, 0o644, 0]))

    def do_chmod_a_folder(self) -> None:
        self.folder().chmod(self.random.choice([0o700, 0o755]))

    def do_shut_a_folder(self) -> None:
        if self.random.random() < 0.2:
            self.folder().chmod(0o100)

    def do_attribute(self) -> None:
        path = self.random.choice([self.file(), self.folder()])
        try:
            os.setxattr(path, "user.x", self.random.randbytes(3))
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise

    def do_touch(self) -> None:
        os.utime(self.file(), ns=(1, self.random.randrange(1 << 40)))


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def splice(source: int, target: int, size: int) -> None:
    if LIBC.splice(source, None, target, None, size, 0) < 0:
        raise OSError(ctypes.get_errno(), "splice")
