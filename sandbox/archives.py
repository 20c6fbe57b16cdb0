"""Workspaces from tar archives, which are never unpacked: their members become a tree in a blob store.

Nothing of an archive reaches a file system under a name of its own. What a workspace cannot hold is refused by name,
not skipped: absolute names, "..", links that leave the tree, devices, pipes, names that are both file and folder.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import posixpath
import tarfile
import zlib
from typing import IO, Any, Self

from . import snapshots
from .agent.workspace import MODES
from .errors import BadPath, SandboxUsageError
from .spec import MAX_FILES

MAX_PATH = 4000  # bytes; what a tool can name below /work
HEADERS = 4 << 10  # bytes that a member may take beside its content
EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
MAX_EXTENDED = 8 << 10  # bytes of a header that says more of a member: two of the longest paths, and some
ZIP = b"PK"
# Headers that say more of headers are read one within the other.
BROKEN = (tarfile.TarError, EOFError, OSError, ValueError, RecursionError, zlib.error, lzma.LZMAError)


class _Bounded(io.RawIOBase):
    """What is unpacked, up to what was allowed so far: an archive of a few bytes may say that it holds terabytes."""

    def __init__(self, source: IO[bytes]) -> None:
        self.source = source
        self.room = 1 << 20

    def read(self, size: int = -1) -> bytes:
        data = self.source.read(size)
        self.room -= len(data)
        if self.room < 0:
            raise SandboxUsageError("the archive holds more bytes than its members' names and sizes account for")
        return data


class _Strict(tarfile.TarInfo):
    """What is no header in the middle of an archive is an error; tarfile would take it for the end. So is an extended
    header of any size: it is searched in a time that grows with its square, and nothing else runs meanwhile."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if type(error).__name__ in ("EmptyHeaderError", "EOFHeaderError"):  # the end, as it should be
                raise
            raise tarfile.ReadError(str(error)) from None
        if header.type in EXTENDED and not 0 <= header.size <= MAX_EXTENDED:
            raise tarfile.ReadError(f"an extended header has {header.size} bytes, longer than {MAX_EXTENDED} allowed")
        return header


def seed_tar(data: bytes, store: snapshots.Sink, limit_bytes: int = 256 << 20) -> str:
    """The root hash of a workspace with the archive's files (plain, gzip, bzip2 or xz). Blocking.

    Raises BadPath for a hostile member and SandboxUsageError for a broken or too large archive, before anything is
    written to the store.
    """
    if data.startswith(ZIP):
        raise SandboxUsageError("this is a zip archive; give a tar archive, plain or packed by gzip, bzip2 or xz")
    tree: snapshots.Tree = []
    blobs: dict[str, bytes] = {}
    room = limit_bytes
    try:
        source = _Bounded(_unpacked(data))
        with tarfile.open(fileobj=source, mode="r|", tarinfo=_Strict) as tar:
            files: dict[str, list[Any]] = {}
            known: snapshots.Known = {}
            for count, member in enumerate(tar, 1):
                room -= member.size
                if room < 0 or member.size < 0 or count > MAX_FILES:
                    raise SandboxUsageError(f"the archive holds more than {limit_bytes} bytes or {MAX_FILES} members")
                source.room += member.size + HEADERS
                _add(tree, tar, member, blobs, files, known)
        while source.read(1 << 16):
            pass  # to the check at its end
    except BROKEN as error:
        if isinstance(error, BadPath):
            raise
        raise SandboxUsageError(f"the archive cannot be read: {error}") from None
    root, folders = snapshots.pack(tree)
    store.put_many([*blobs.values(), *folders.values()])
    return root


def _unpacked(data: bytes) -> Any:
    raw = io.BytesIO(data)
    if data.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if data.startswith(b"BZh"):
        return bz2.BZ2File(raw)
    return lzma.LZMAFile(raw) if data.startswith(b"\xfd7zXZ\0") else raw


def _add(
    tree: snapshots.Tree,
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    blobs: dict[str, bytes],
    files: dict[str, list[Any]],
    known: snapshots.Known,
) -> None:
    names = _names(member.name)
    if not names:
        if member.isdir():
            return  # the archive's own root
        raise BadPath(f"{member.name!r} names the workspace itself")
    if member.isdir():
        _folder(tree, names, member, known)
        return
    leaf = _leaf(tar, member, names, blobs, files)
    snapshots.place(tree, names[:-1], leaf, member.name, known)
    if leaf[1] in "fs":
        files["/".join(names)] = leaf


def _leaf(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    names: list[str],
    blobs: dict[str, bytes],
    files: dict[str, list[Any]],
) -> list[Any]:
    if member.issym():
        meant = posixpath.normpath("/".join([*names[:-1], member.linkname]))
        if member.linkname.startswith("/") or meant.split("/")[0] == ".." or "\0" in member.linkname:
            raise BadPath(f"{member.name!r} is a link to {member.linkname!r}, outside the workspace")
        return [names[-1], "l", member.linkname]
    if member.islnk():  # a copy: a workspace that is sent in has no two names for one file
        first = files.get("/".join(_names(member.linkname)))
        if first is None:
            raise BadPath(f"{member.name!r} is a hard link to {member.linkname!r}, which is no file of the archive")
        return [names[-1], *first[1:]]
    source = tar.extractfile(member) if member.isreg() else None
    if source is None:
        raise BadPath(f"{member.name!r} is neither file, folder nor link; a workspace holds nothing else")
    content = source.read()
    if len(content) != member.size:
        raise SandboxUsageError(f"the archive cannot be read: {member.name!r} is cut off")
    kind, blob = snapshots.form(content)
    digest = hashlib.sha256(blob).hexdigest()
    blobs[digest] = blob
    return [names[-1], kind, member.mode & MODES, digest, len(content)]


def _names(path: str) -> list[str]:
    names = [name for name in path.split("/") if name not in ("", ".")]
    if path.startswith("/") or ".." in names or "\0" in path:
        raise BadPath(f"{path!r} leaves the workspace")
    sizes = [len(name.encode("utf-8", "surrogatepass")) for name in names]
    if sum(sizes) + len(sizes) > MAX_PATH or any(size > snapshots.MAX_NAME_BYTES for size in sizes):
        raise BadPath(f"{path[:40]!r}... is longer than a path ({MAX_PATH} bytes) or a name in it (255) can be")
    return names


def _folder(tree: snapshots.Tree, names: list[str], member: tarfile.TarInfo, known: snapshots.Known) -> None:
    above = snapshots.below(tree, names[:-1], member.name, known)
    snapshots.below(above, names[-1:], member.name, known)
    known[id(above)][names[-1]][2] = member.mode & MODES
