"""A session as one file: what is in it, and how one that came from anywhere is read.

A plain tar, in this order: `session.json`, the record in lines of JSON (`transcript`, `steps`, `calls`, `events`,
`checkpoints`), the workspace as the blobs of its snapshots (`blobs/<sha256>`, as sandbox/snapshots.py describes them),
and last `manifest.json`, which names every member with its size and sha256. KV is not in it: pages are keyed by a
tenant's salt, and are computed again from the tokens. Secrets (values of headers and of environments) are not in it
either; `session.json` says which are missing.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, Self, TypeVar

from pydantic import BaseModel, ValidationError

from runtime.archive_shapes import CallRow, CheckpointRow, Manifest, Segments, SessionFile, StepRow
from runtime.errors import InvalidRequest
from runtime.text import fault
from sandbox import BlobMissing
from sandbox.spec import MAX_FILES

FORMAT: Final = 1
MAX_BYTES: Final = 512 << 20  # of an archive that is sent in
MAX_SESSION_BYTES: Final = 4 << 20
MAX_LINES_BYTES: Final = 128 << 20  # of one part of the record
MAX_LINES: Final = 200_000
MAX_BLOBS: Final = 4 * MAX_FILES
LINES: Final = ("transcript.jsonl", "steps.jsonl", "calls.jsonl", "events.jsonl", "checkpoints.jsonl")
FIRST, LAST = "session.json", "manifest.json"
_BLOB: Final = re.compile(r"blobs/([0-9a-f]{64})\Z")
_DEEPEST: Final = 128
Row = TypeVar("Row", bound=BaseModel)


class _Plain(tarfile.TarInfo):
    """Exports have no extended headers. tarfile searches those in a time that grows with their square."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type in tarfile.GNU_TYPES or header.type not in tarfile.SUPPORTED_TYPES:
            raise tarfile.ReadError("it has a header that no export has")
        return header


class Archive:
    """One that was read to its end, and is what its manifest says. `blobs` are read from it when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Blocking. Raises InvalidRequest, in a sentence, for whatever is wrong with it."""
        self._file = path.open("rb")
        try:
            self._members = dict(_members(self._file))
            self._check_manifest()
            self.session = SessionFile.model_validate(self._json(FIRST))
            self.segments = self._lines("transcript.jsonl", Segments)
            self.steps = self._lines("steps.jsonl", StepRow)
            self.calls = self._lines("calls.jsonl", CallRow)
            self.checkpoints = self._lines("checkpoints.jsonl", CheckpointRow)
        except ValidationError as error:
            self.close()
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidRequest(f"the archive has a record that cannot be: {where}: {first['msg']}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def get(self, digest: str) -> bytes:
        """A blob, which has been verified. Raises BlobMissing."""
        if f"blobs/{digest}" not in self._members:
            raise BlobMissing(f"the archive has no blob {digest}")
        return self._read(f"blobs/{digest}")

    def size_of(self, digest: str) -> int | None:
        """A blob's bytes; None: it is not in it."""
        member = self._members.get(f"blobs/{digest}")
        return None if member is None else member[1]

    def _read(self, name: str) -> bytes:
        offset, size, _ = self._members[name]
        self._file.seek(offset)
        return self._file.read(size)

    def _json(self, name: str) -> Any:
        return _parsed(self._read(name), name)

    def _lines(self, name: str, kind: type[Row]) -> list[Row]:
        lines = self._read(name).splitlines()
        if len(lines) > MAX_LINES:
            raise InvalidRequest(f"{name} of the archive has {len(lines)} lines; at most {MAX_LINES} are read")
        return [kind.model_validate(_parsed(line, name)) for line in lines]

    def _check_manifest(self) -> None:
        if LAST not in self._members:
            raise InvalidRequest(f"the archive has no {LAST}: it is cut off, or no export of a session")
        manifest = Manifest.model_validate(self._json(LAST))
        if manifest.format != FORMAT:
            raise InvalidRequest(f"the archive is of format {manifest.format}; this release reads format {FORMAT}")
        told = {one.name: (one.size, one.sha256) for one in manifest.members}
        found = {name: (size, sha256) for name, (_, size, sha256) in self._members.items() if name != LAST}
        for name in sorted(told.keys() | found.keys()):
            if told.get(name) != found.get(name):
                raise InvalidRequest(
                    f"{name!r} of the archive is not what its manifest says: it was damaged or altered"
                )
        for name in (FIRST, *LINES):
            if name not in found:
                raise InvalidRequest(f"the archive has no {name}")


def _parsed(text: bytes, name: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} of the archive is not JSON: {str(error)[:200]}") from None
    if deeper_than(value, _DEEPEST):
        raise InvalidRequest(f"{name} of the archive is nested more than {_DEEPEST} deep")
    if wrong := fault(value):
        raise InvalidRequest(f"{name} of the archive: {wrong}")
    return value


def deeper_than(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            below
            for one in level
            if isinstance(one, dict | list)
            for below in (one.values() if isinstance(one, dict) else one)
            if isinstance(below, dict | list)
        ]
        if not level:
            return False
    return True


def _members(file: IO[bytes]) -> Iterator[tuple[str, tuple[int, int, str]]]:
    """Every member by name: where its bytes are, how many, and their sha256. Nothing is unpacked."""
    seen: set[str] = set()
    try:
        with tarfile.open(fileobj=file, mode="r:", tarinfo=_Plain) as tar:
            for member in tar:
                name = member.name
                _check_member(member, seen)
                seen.add(name)
                yield name, (member.offset_data, member.size, _sha256(tar, member))
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise InvalidRequest(f"the archive cannot be read: {error}; send a plain tar as the export gave it") from None


def _check_member(member: tarfile.TarInfo, seen: set[str]) -> None:
    name = member.name
    if not member.isreg() or member.issparse():
        raise InvalidRequest(f"{name[:200]!r} of the archive is no plain file")
    if name not in (FIRST, LAST, *LINES) and not _BLOB.match(name):
        raise InvalidRequest(f"{name[:200]!r} is nothing that the archive of a session has")
    if name in seen:
        raise InvalidRequest(f"{name!r} is in the archive twice")
    if len(seen) > MAX_BLOBS:
        raise InvalidRequest(f"the archive has more than {MAX_BLOBS} members")
    most = MAX_SESSION_BYTES if name == FIRST else MAX_LINES_BYTES if not _BLOB.match(name) else MAX_BYTES
    if member.size > most:
        raise InvalidRequest(f"{name!r} of the archive has {member.size} bytes; at most {most} are read")
    if not seen and name != FIRST:
        raise InvalidRequest(f"the archive begins with {name!r}, not with {FIRST}: it is no export of a session")


def _sha256(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    source = tar.extractfile(member)
    assert source is not None
    digest, size = hashlib.sha256(), 0
    while piece := source.read(1 << 20):
        digest.update(piece)
        size += len(piece)
    if size != member.size:
        raise InvalidRequest(f"{member.name!r} of the archive is cut off")
    if (blob := _BLOB.match(member.name)) and blob[1] != digest.hexdigest():
        raise InvalidRequest(f"{member.name!r} of the archive does not have the bytes that its name says")
    return digest.hexdigest()
