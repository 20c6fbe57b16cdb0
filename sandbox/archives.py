"""Workspaces from tar archives, which are never unpacked: their members become a tree in a blob store.

Nothing of an archive reaches a file system under a name of its own. What a workspace cannot hold is refused by name,
not skipped: absolute names, "..", links that leave the tree, devices, pipes, names that are both file and folder.
"""

from __future__ import annotations

import hashlib
import io
import posixpath
import tarfile
from typing import Any

from . import snapshots
from .blobs import BlobStore
from .errors import BadPath, SandboxUsageError
from .spec import MAX_FILES


def seed_tar(data: bytes, store: BlobStore, limit_bytes: int = 256 << 20) -> str:
    """The root hash of a workspace with the archive's files (plain, gzip, bzip2 or xz). Blocking.

    Raises BadPath for a hostile member and SandboxUsageError for a broken or too large archive, before anything is
    written to the store.
    """
    tree: snapshots.Tree = []
    blobs: dict[str, bytes] = {}
    room = limit_bytes
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for count, member in enumerate(tar, 1):
                room -= member.size
                if room < 0 or count > MAX_FILES:
                    raise SandboxUsageError(f"the archive holds more than {limit_bytes} bytes or {MAX_FILES} members")
                _add(tree, tar, member, blobs)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        if isinstance(error, BadPath):
            raise
        raise SandboxUsageError(f"the archive cannot be read: {error}") from None
    root, folders = snapshots.pack(tree)
    store.put_many([*blobs.values(), *folders.values()])
    return root


def _add(tree: snapshots.Tree, tar: tarfile.TarFile, member: tarfile.TarInfo, blobs: dict[str, bytes]) -> None:
    names = _names(member.name)
    if not names:
        if member.isdir():
            return  # the archive's own root
        raise BadPath(f"{member.name!r} names the workspace itself")
    if member.isdir():
        _folder(tree, names, member)
        return
    snapshots.place(tree, names[:-1], _leaf(tar, member, names, blobs), member.name)


def _leaf(tar: tarfile.TarFile, member: tarfile.TarInfo, names: list[str], blobs: dict[str, bytes]) -> list[Any]:
    if member.issym():
        meant = posixpath.normpath("/".join([*names[:-1], member.linkname]))
        if member.linkname.startswith("/") or meant.split("/")[0] == "..":
            raise BadPath(f"{member.name!r} is a link to {member.linkname!r}, outside the workspace")
        return [names[-1], "l", member.linkname]
    if member.islnk():
        _names(member.linkname)
    elif not member.isreg():
        raise BadPath(f"{member.name!r} is neither file, folder nor link; a workspace holds nothing else")
    try:
        source = tar.extractfile(member)
    except KeyError:
        source = None
    if source is None:
        raise BadPath(f"{member.name!r} is a hard link to {member.linkname!r}, which is no file of the archive")
    content = source.read()
    digest = hashlib.sha256(content).hexdigest()
    blobs[digest] = content
    return [names[-1], "f", member.mode & 0o777, digest, len(content)]


def _names(path: str) -> list[str]:
    names = [name for name in path.split("/") if name not in ("", ".")]
    if path.startswith("/") or ".." in names or "\0" in path:
        raise BadPath(f"{path!r} leaves the workspace")
    return names


def _folder(tree: snapshots.Tree, names: list[str], member: tarfile.TarInfo) -> None:
    for depth, name in enumerate(names, 1):
        found = next((entry for entry in tree if entry[0] == name), None)
        if found is None:
            found = [name, "d", 0o755, []]
            tree.append(found)
        if found[1] != "d":
            raise BadPath(f"{member.name!r} goes through {name!r}, which is not a folder")
        if depth == len(names):
            found[2] = member.mode & 0o777
        tree = found[3]
