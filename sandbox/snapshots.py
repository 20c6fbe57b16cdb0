"""Workspaces as content-addressed trees: one blob per file, one per directory, named by the root's hash.

A directory's blob is JSON: a list sorted by name of [name, "f", mode, sha256, size], [name, "d", mode, sha256] and
[name, "l", target]. Names that are not UTF-8 carry surrogate escapes. Modes are the nine permission bits. Owners,
times, extended attributes and hard links are not kept; sockets and pipes are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from .blobs import BlobStore
from .errors import BadPath, BlobCorrupt

# A directory's blob has hashes where a scanned or loaded tree has nested lists. A scan also has [name, "o"] for sockets
# and pipes: no snapshot keeps them, and a restore removes them.
Tree = list[list[Any]]


def encode(entries: Tree) -> bytes:
    return json.dumps(entries, separators=(",", ":")).encode()


def pack(tree: Tree) -> tuple[str, dict[str, bytes]]:
    """Nested lists (entries of "d" in place) to the root's hash and the directory blobs by hash."""
    blobs: dict[str, bytes] = {}
    entries = []
    for entry in sorted(tree, key=lambda entry: str(entry[0])):
        if entry[1] == "o":
            continue
        if entry[1] == "d":
            digest, inner = pack(entry[3])
            blobs.update(inner)
            entry = [entry[0], "d", entry[2], digest]
        entries.append(entry)
    blob = encode(entries)
    digest = hashlib.sha256(blob).hexdigest()
    blobs[digest] = blob
    return digest, blobs


def load(root: str, store: BlobStore) -> Tree:
    """The inverse of `pack`, from a store. Raises BlobMissing or BlobCorrupt."""
    entries = _parse(root, store.get(root))
    for entry in entries:
        check_name(entry[0])
        if entry[1] == "d":
            entry[3] = load(entry[3], store)
    return entries


def _parse(root: str, blob: bytes) -> Tree:
    shapes = {"f": (str, str, int, str, int), "d": (str, str, int, str), "l": (str, str, str)}
    try:
        entries: Tree = json.loads(blob)
        for entry in entries:
            if tuple(map(type, entry)) != shapes[entry[1]]:
                raise ValueError(f"{entry!r} is no entry")
    except (ValueError, LookupError, TypeError) as error:
        raise BlobCorrupt(f"the blob {root} is not a directory: {error}") from None
    return entries


def files(tree: Tree, prefix: str = "") -> Iterator[tuple[str, str, int]]:
    """(path, sha256, size) of every file."""
    for entry in tree:
        if entry[1] == "f":
            yield prefix + entry[0], entry[3], entry[4]
        elif entry[1] == "d":
            yield from files(entry[3], f"{prefix}{entry[0]}/")


def reachable(root: str, store: BlobStore) -> set[str]:
    """Every blob that this root needs: what a collector must keep."""
    found = {root}
    for entry in _parse(root, store.get(root)):
        if entry[1] == "f":
            found.add(entry[3])
        elif entry[1] == "d" and entry[3] not in found:
            found |= reachable(entry[3], store)
    return found


MAX_NAME_BYTES = 255
MAX_DEPTH = 100


def check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise BadPath(f"{name!r} cannot be a file's name")


def seed(contents: Mapping[str, bytes], store: BlobStore) -> str:
    """The root hash of a workspace with these files; paths are relative, parents are made. Blobs go to the store.

    Raises BadPath, before anything is written, as `plan` does.
    """
    root, blobs = pack(plan(contents))
    store.put_many([*contents.values(), *blobs.values()])
    return root


def plan(contents: Mapping[str, bytes]) -> Tree:
    """The tree of a workspace with these files. Writes nothing.

    Raises BadPath where a path is absolute, leaves the workspace, or is both file and folder.
    """
    tree: Tree = []
    for path, data in sorted(contents.items()):
        names = path.split("/")
        if path.startswith("/"):
            raise BadPath(f"{path!r} is absolute; name files relative to the workspace")
        if len(names) > MAX_DEPTH:
            raise BadPath(f"{path[:40]!r}... lies more than {MAX_DEPTH} folders deep")
        for name in names:
            if name in ("", ".", "..") or "\0" in name:
                raise BadPath(f"{path!r} is not a plain relative path")
            if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
                raise BadPath(f"{name[:40]!r}... is longer than the {MAX_NAME_BYTES} bytes that a file's name may have")
        entry = [names[-1], "f", 0o644, hashlib.sha256(data).hexdigest(), len(data)]
        place(tree, names[:-1], entry, path)
    return tree


def place(tree: Tree, folders: list[str], entry: list[Any], path: str) -> None:
    for name in folders:
        found = next((each for each in tree if each[0] == name), None)
        if found is None:
            found = [name, "d", 0o755, []]
            tree.append(found)
        if found[1] != "d":
            raise BadPath(f"{path!r} goes through {name!r}, which is a file")
        tree = found[3]
    if any(each[0] == entry[0] for each in tree):
        raise BadPath(f"{path!r} is both a file and a folder")
    tree.append(entry)


def changes(have: Tree, want: Tree, prefix: str = "") -> tuple[list[list[Any]], list[list[Any]]]:
    """Steps that turn `have` into `want`: (in this order, then the modes of folders, deepest first).

    Steps are ["rm", path], ["dir", path], ["link", path, target], ["mode", path, mode] and
    ["file", path, mode, size, sha256].
    """
    steps: list[list[Any]] = []
    modes: list[list[Any]] = []
    old = {entry[0]: entry for entry in have}
    new = {entry[0]: entry for entry in want}
    for name, entry in old.items():
        if name not in new or not same_kind(entry, new[name]):
            steps.append(["rm", prefix + name])
    for name, entry in new.items():
        path, before = prefix + name, old.get(name)
        kept = before is not None and same_kind(before, entry)
        if entry[1] == "d":
            inner = before[3] if kept and before is not None else []
            if not kept:
                steps.append(["dir", path])
            deeper, deeper_modes = changes(inner, entry[3], path + "/")
            if deeper and kept:
                steps.append(["mode", path, 0o700])
            steps += deeper
            modes += deeper_modes
            # A scan leaves folders open that deny their owner, so their mode is always set again.
            if deeper or not kept or entry[2] & 0o700 != 0o700 or (before is not None and before[2] != entry[2]):
                modes.append(["mode", path, entry[2]])
        elif not kept and entry[1] == "l":
            steps.append(["link", path, entry[2]])
        elif not kept:
            steps.append(["file", path, entry[2], entry[4], entry[3]])
        elif entry[1] == "f" and before is not None and before[2] != entry[2]:
            steps.append(["mode", path, entry[2]])
    return steps, modes


def same_kind(old: list[Any], new: list[Any]) -> bool:
    """Whether `old` can stay: a folder stays a folder; a file or link stays when its content does."""
    if old[1] != new[1]:
        return False
    if old[1] == "d":
        return True
    return bool(old[3:] == new[3:] if old[1] == "f" else old[2] == new[2])
