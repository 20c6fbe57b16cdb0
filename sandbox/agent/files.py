"""The operations on files, and freezing while they are read."""

from __future__ import annotations

import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from .again import Memory
from .content import WINDOW, run_head, runs
from .errors import Refused
from .processes import held, mapped, processes, stop
from .scan import Folder, walk
from .wire import Connection
from .workspace import Workspace, write_all

MAX_READ = 8 << 20
Json = dict[str, Any]
Reply = tuple[Json, bytes]


class FileOperations(ABC):
    """What the controller may do with the workspace. Every path is checked by `Workspace`."""

    def __init__(self, root: str) -> None:
        self.workspace = Workspace(root)
        self.memory = Memory(self.workspace)
        self.folders: dict[str, Folder] = {}  # what the last scan saw, by hash
        self.written: set[int] = set()  # inodes of uploads since then

    @abstractmethod
    def everything(self) -> set[int]: ...

    def file_operations(self) -> dict[str, Callable[[Connection, Json, bytes], Reply | None]]:
        return {
            "put": self.op_put,
            "read": self.op_read,
            "list": self.op_list,
            "scan": self.op_scan,
            "folders": self.op_folders,
            "runs": self.op_runs,
            "apply": self.op_apply,
        }

    def directory(self, cwd: str) -> str:
        """Where a call starts; anything outside the workspace is named as it is."""
        if cwd == "/work" or cwd.startswith("/work/"):
            return self.workspace.root + cwd[5:]
        return cwd

    def freeze(self, find: Callable[[], set[int]]) -> list[int]:
        """Stops all tools and waits until they stand; those that already stood are not ours to wake."""
        if not find():
            return []
        before = processes()
        asleep = {pid for pid, (_, state) in before.items() if state in "Tt"}
        stopped: set[int] = set()
        stand, deadline = False, time.monotonic() + 2
        while time.monotonic() < deadline:
            new = stop(find) - stopped
            if stand and not new:
                break  # a fork that was under way when its process was told to stop has been found too
            stopped |= new
            table = processes()
            stand = all(table[pid][1] in "TtZX" for pid in stopped if pid in table)
            if not stand:
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
        self.written.add(os.fstat(file).st_ino)
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

    def op_runs(self, connection: Connection, header: Json, body: bytes) -> Reply:
        """What a file holds beside zeros, from an offset on: runs with their heads, and where to ask next."""
        fd = self.workspace.open_file(header["path"])
        try:
            size = os.fstat(fd).st_size
            after, pieces, room = int(header["offset"]), [], MAX_READ
            for start, data in runs(fd, after, size):
                if room <= 0 and start >= after:
                    break
                after = start - start % WINDOW + WINDOW
                pieces += [run_head(start, data), data]
                room -= len(data)
            else:
                after = size
        finally:
            os.close(fd)
        return {"next": after}, b"".join(pieces)

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
        """The root's hash, and the blobs of the folders that are not what they were at the last scan."""
        tools = self.everything()
        open_files = held(tools)
        if open_files is not None:
            open_files |= self.written
        scan = self.memory.look(mapped(tools), open_files, bool(header.get("verify")))
        self.written = set()
        self.folders = {folder.digest: folder for folder in scan.folders}
        others = [path for folder in scan.folders for path in folder.others]
        found, blobs = blobs_of(folder for folder in scan.folders if folder.digest != folder.before)
        for folder in scan.folders:
            folder.text = b""
        reply = {"root": scan.root, "folders": found, "others": others}
        return {**reply, "left_out": scan.left_out, "stale": scan.stale}, blobs

    def op_folders(self, connection: Connection, header: Json, body: bytes) -> Reply:
        """Blobs of the last scan's folders by hash, with those below them, as many as fit."""
        todo = [self.folders[digest] for digest in reversed(header["digests"])]
        found, blobs = blobs_of(walk(todo))
        return {"folders": found}, blobs

    def op_apply(self, connection: Connection, header: Json, body: bytes) -> Reply:
        """Steps of a restore in order; ["file", path, mode, n] and ["more", path, offset, n] take n bytes of the body.

        Answers the paths whose extended attributes the file system cannot hold.
        """
        self.workspace.unlocked = []  # a restore sets every such mode itself
        view, bare = memoryview(body), []
        fd = self.workspace.open_root(os.O_PATH)
        where: list[str] = []
        try:
            for step in header["steps"]:
                size = step[3] if step[0] in ("file", "more") else 0
                *folders, name = self.workspace.parts(step[1])
                if folders != where:
                    here, fd = fd, -1  # closed on the way
                    fd, where = self.go(here, where, folders), folders
                if not self.workspace.apply(fd, name, step, view[:size]):
                    bare.append(step[1])
                view = view[size:]
        finally:
            if fd >= 0:
                os.close(fd)
        return {"bare": bare}, b""

    def go(self, fd: int, here: list[str], there: list[str]) -> int:
        """From one folder to another, by a short way where there is one: a tree may be thousands deep."""
        path, names = "/".join(there), there[len(here) :]
        if there == here[:-1]:
            names = [".."]
        elif there[: len(here)] != here:
            os.close(fd)
            fd, names = self.workspace.open_root(os.O_PATH), there
        return self.workspace.open_below(fd, path, names)


def blobs_of(folders: Iterable[Folder]) -> tuple[list[list[Any]], bytes]:
    """[hash, length, hash of what was there before] of each, and the blobs; at least one, and as many as fit."""
    found: list[list[Any]] = []
    blobs: list[bytes] = []
    room = MAX_READ
    for folder in folders:
        blob = folder.blob()
        room -= len(blob)
        if room < 0 and blobs:
            break
        found.append([folder.digest, len(blob), folder.before])
        blobs.append(blob)
    return found, b"".join(blobs)
