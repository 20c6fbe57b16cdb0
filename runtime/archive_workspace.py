"""Whether a workspace that came in an archive could be restored, before a blob of it is stored."""

from __future__ import annotations

import re
import struct
from typing import Any, Final

from runtime.archives import Archive
from runtime.errors import InvalidRequest
from sandbox import SandboxError, snapshots
from sandbox.spec import MAX_FILES

MODES: Final = 0o1777
MAX_XATTRS: Final = 64
MAX_XATTR_BYTES: Final = 64 << 10
_HEX: Final = re.compile(r"(?:[0-9a-f]{2})*\Z")
_RUN: Final = struct.Struct(">QQ")


def checked(archive: Archive, root: str, limit_bytes: int) -> set[str]:
    """The blobs of a snapshot that is wholly in the archive. Raises InvalidRequest for one that could not be restored.

    Entries are counted as often as they are named: a few blobs could else make a workspace of any size. What is not in
    the archive is not taken from the store, where it may be somebody else's.
    """
    found, entries, room = {root}, 0, limit_bytes
    todo = [(root, 0)]
    try:
        while todo:
            digest, depth = todo.pop()
            names: set[str] = set()
            for entry in snapshots.parse(digest, archive.get(digest)):
                snapshots.check_name(entry[0])
                entries += 1
                if entries > MAX_FILES or depth >= snapshots.MAX_DEPTH or entry[0] in names:
                    raise InvalidRequest("the archive's workspace has too many files, too deep ones, or one name twice")
                names.add(entry[0])
                room -= _size(archive, entry)
                if room < 0:
                    raise InvalidRequest(
                        f"the archive's workspace is larger than the {limit_bytes} bytes that its session may have"
                    )
                if entry[1] in "fsd":
                    found.add(entry[3])
                if entry[1] == "d":
                    todo.append((entry[3], depth + 1))
        snapshots.load(root, archive)
    except SandboxError as error:
        raise InvalidRequest(f"the archive's workspace cannot be restored: {error}") from None
    return found


def _size(archive: Archive, entry: list[Any]) -> int:
    """Bytes of a file; 0 of what is none. Raises InvalidRequest where the entry is not what its blob is."""
    kind = entry[1]
    if len(entry[0].encode("utf-8", "surrogateescape")) > snapshots.MAX_NAME_BYTES:
        raise InvalidRequest("a name in the archive's workspace is too long")
    if kind == "l" and ("\0" in entry[2] or not 0 < len(entry[2].encode("utf-8", "surrogateescape")) < 4096):
        raise InvalidRequest(f"the link {entry[0]!r} in the archive's workspace points to what is no path")
    if kind in "hl":
        return 0
    if not 0 <= entry[2] <= MODES:
        raise InvalidRequest(f"{entry[0]!r} in the archive's workspace has a mode that no file has")
    _check_attributes(entry[0], entry[4 if kind == "d" else 5 :])
    if kind == "d":
        return 0
    stored = archive.size_of(entry[3])
    if stored is None:
        raise InvalidRequest(f"the archive does not have the content of {entry[0]!r}")
    if entry[4] < 0 or (kind == "f" and stored != entry[4]):
        raise InvalidRequest(f"{entry[0]!r} in the archive's workspace does not have the size that is told of it")
    if kind == "s":
        _check_runs(entry[0], archive.get(entry[3]), entry[4])
    return int(entry[4])


def _check_attributes(name: str, values: list[Any]) -> None:
    for one in values:
        whole = isinstance(one, dict) and len(one) <= MAX_XATTRS
        if not whole or not all(
            key.startswith("user.")
            and len(key.encode("utf-8", "surrogateescape")) <= 255
            and "\0" not in key
            and isinstance(value, str)
            and len(value) <= 2 * MAX_XATTR_BYTES
            and _HEX.match(value)
            for key, value in one.items()
        ):
            raise InvalidRequest(f"{name!r} in the archive's workspace has attributes that no file has")


def _check_runs(name: str, blob: bytes, size: int) -> None:
    at = end = 0
    while at < len(blob):
        if at + _RUN.size > len(blob):
            raise InvalidRequest(f"the content of {name!r} in the archive's workspace is cut off")
        start, length = _RUN.unpack_from(blob, at)
        at += _RUN.size + length
        if start < end or start + length > size or at > len(blob):
            raise InvalidRequest(f"the content of {name!r} in the archive's workspace does not fit its size")
        end = start + length
