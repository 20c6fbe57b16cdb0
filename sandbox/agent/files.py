"""The operations on files, and freezing while they are read."""

from __future__ import annotations

import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .errors import Refused
from .processes import processes, shared_writable, stop
from .wire import Connection
from .workspace import Workspace, write_all

MAX_READ = 8 << 20
Json = dict[str, Any]
Reply = tuple[Json, bytes]


class FileOperations(ABC):
    """What the controller may do with the workspace. Every path is checked by `Workspace`."""

    def __init__(self, root: str) -> None:
        self.workspace = Workspace(root)

    @abstractmethod
    def everything(self) -> set[int]: ...

    def file_operations(self) -> dict[str, Callable[[Connection, Json, bytes], Reply | None]]:
        return {
            "put": self.op_put,
            "read": self.op_read,
            "list": self.op_list,
            "scan": self.op_scan,
            "apply": self.op_apply,
        }

    def directory(self, cwd: str) -> str:
        """Where a call starts; anything outside the workspace is named as it is."""
        if cwd == "/work" or cwd.startswith("/work/"):
            return self.workspace.root + cwd[5:]
        return cwd

    def freeze(self, find: Callable[[], set[int]]) -> list[int]:
        """Stops all tools and waits until they stand; those that already stood are not ours to wake."""
        before = processes()
        asleep = {pid for pid, (_, state) in before.items() if state in "Tt"}
        stopped = stop(find)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            table = processes()
            if all(table[pid][1] in "TtZX" for pid in stopped if pid in table):
                break
            time.sleep(0.001)
        return sorted(stopped - asleep)

    def op_put(self, connection: Connection, header: Json, body: bytes) -> Reply:
        """One piece of a file; it appears under its name, whole, with the last."""
        path = header["path"]
        if header["first"]:
            self.abandon(connection, path)
            directory, _ = self.workspace.parent(path, make=True)
            temporary = f".{os.urandom(8).hex()}.part"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                file = os.open(temporary, flags, 0o600, dir_fd=directory)
            except OSError:
                os.close(directory)
                raise
            connection.uploads[path] = (file, directory, temporary)
        if path not in connection.uploads:
            raise Refused("request", f"no upload of {path!r} is open")
        file, directory, temporary = connection.uploads[path]
        try:
            write_all(file, memoryview(body))
            if header["last"]:
                os.fchmod(file, header["mode"] & 0o777)
                os.replace(temporary, self.workspace.parts(path)[-1], src_dir_fd=directory, dst_dir_fd=directory)
                del connection.uploads[path]
                os.close(file)
                os.close(directory)
        except OSError:
            self.abandon(connection, path)
            raise
        return {}, b""

    def abandon(self, connection: Connection, path: str) -> None:
        file, directory, temporary = connection.uploads.pop(path, (-1, -1, ""))
        if temporary:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            os.close(file)
            os.close(directory)

    def abandon_uploads(self, connection: Connection) -> None:
        for path in list(connection.uploads):
            self.abandon(connection, path)

    def op_read(self, connection: Connection, header: Json, body: bytes) -> Reply:
        """Pieces of files: items are [path, offset, length]; answers their signatures and lengths, bodies joined."""
        pieces, found, room = [], [], MAX_READ
        for path, offset, length in header["items"]:
            fd = self.workspace.open_file(path)
            try:
                st = os.fstat(fd)
                data = os.pread(fd, min(length, room), offset)
            finally:
                os.close(fd)
            room -= len(data)
            pieces.append(data)
            signature = f"{st.st_ino}.{st.st_size}.{st.st_mtime_ns}"
            found.append([signature, len(data), st.st_size, st.st_mode & 0o777])
        return {"found": found}, b"".join(pieces)

    def op_list(self, connection: Connection, header: Json, body: bytes) -> Reply:
        path = header["path"]
        fd = self.workspace.open_dir(path, self.workspace.parts(path))
        entries = []
        try:
            readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
            try:
                names = sorted(os.listdir(readable))
            finally:
                os.close(readable)
            for name in names:
                st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                kind = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
                entries.append([name, kind.get(stat.S_IFMT(st.st_mode), "other"), st.st_size, st.st_mode & 0o777])
        finally:
            os.close(fd)
        return {"entries": entries}, b""

    def op_scan(self, connection: Connection, header: Json, body: bytes) -> Reply:
        return {"tree": self.workspace.scan(shared_writable(self.everything()))}, b""

    def op_apply(self, connection: Connection, header: Json, body: bytes) -> Reply:
        """Steps of a restore in order; a step ["file", path, mode, size] takes `size` bytes of the body."""
        self.workspace.unlocked = []  # a restore sets every such mode itself
        view = memoryview(body)
        for step in header["steps"]:
            size = step[3] if step[0] == "file" else 0
            self.workspace.apply(step, view[:size])
            view = view[size:]
        return {}, b""
