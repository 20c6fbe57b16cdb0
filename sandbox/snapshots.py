"""Workspaces as content-addressed trees: one blob per file, one per directory, named by the root's hash.

A directory's blob is JSON: a list sorted by name of entries, which are
  [name, "f", mode, sha256, size]      a file; its blob is its content
  [name, "s", mode, sha256, size]      a file that is mostly zeros; its blob is its runs of other bytes, each after its
                                       offset and length (uint64, big-endian)
  [name, "h", path]                    another name of the file at `path`, which is the first one
  [name, "d", mode, sha256]            a folder
  [name, "l", target]                  a symbolic link, kept as text
with the extended attributes of "f", "s" and "d", where there are any, as one more value: {name: hex}. A file's first
name is the first in a walk that takes a folder's own files before what is in its folders.

Names that are not UTF-8 carry surrogate escapes. Modes are the nine permission bits and the sticky bit: a workspace is
mounted nosuid, so the other two mean nothing in it. Of extended attributes those under "user." are kept; owners, times
and ACLs are not, nor those of the workspace itself; sockets and pipes are left out. Times stay out because a root
names a content: a call that runs again, or another session, comes to the same root.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from .agent.content import SPARSE_FROM, WINDOW, filled_pages, run_head
from .changes import Tree, changes
from .errors import BadPath, BlobCorrupt

__all__ = [
    "Known",
    "Sink",
    "Source",
    "Tree",
    "below",
    "changes",
    "check_name",
    "encode",
    "files",
    "form",
    "load",
    "pack",
    "parse",
    "place",
    "plan",
    "reachable",
]
__all__ += ["seed", "sparse"]

SHAPES: Mapping[str, tuple[type, ...]] = {
    "f": (str, str, int, str, int),
    "s": (str, str, int, str, int),
    "h": (str, str, str),
    "d": (str, str, int, str),
    "l": (str, str, str),
}


def encode(entries: Tree) -> bytes:
    return json.dumps(entries, separators=(",", ":")).encode()


def pack(tree: Tree) -> tuple[str, dict[str, bytes]]:
    """Nested lists (entries of "d" in place) to the root's hash and the directory blobs by hash, children first.

    Entries [name, "o"], which stand for sockets and pipes, are left out.
    """
    order = [tree]
    for folder in order:
        order += [entry[3] for entry in folder if entry[1] == "d"]
    digests: dict[int, str] = {}
    blobs: dict[str, bytes] = {}
    for folder in reversed(order):
        kept = sorted((entry for entry in folder if entry[1] != "o"), key=lambda entry: str(entry[0]))
        blob = encode([[*e[:3], digests[id(e[3])], *e[4:]] if e[1] == "d" else e for e in kept])
        digests[id(folder)] = hashlib.sha256(blob).hexdigest()
        blobs.setdefault(digests[id(folder)], blob)
    return digests[id(tree)], blobs


class Sink(Protocol):
    """Takes blobs, in this order."""

    def put_many(self, blobs: Iterable[bytes]) -> object: ...


class Source(Protocol):
    """Gives blobs by their hash. Raises BlobMissing, BlobCorrupt."""

    def get(self, digest: str) -> bytes: ...


def load(root: str, store: Source) -> Tree:
    """The inverse of `pack`, from a store. Raises BlobMissing or BlobCorrupt."""
    top: Tree = []
    paths: set[str] = set()
    names: list[str] = []
    todo = [("", root, top)]
    while todo:
        prefix, digest, tree = todo.pop()
        tree += parse(digest, store.get(digest))
        for entry in tree:
            check_name(entry[0])
            if entry[1] in "fs":
                paths.add(prefix + entry[0])
            elif entry[1] == "h":
                names.append(entry[2])
            elif entry[1] == "d":
                below: Tree = []
                todo.append((f"{prefix}{entry[0]}/", entry[3], below))
                entry[3] = below
    for name in names:
        if name not in paths:
            raise BlobCorrupt(f"the snapshot {root} has another name of {name!r}, which is none of its files")
    return top


def parse(digest: str, blob: bytes) -> Tree:
    """The entries of one directory's blob. Raises BlobCorrupt where it is none."""
    try:
        entries: Tree = json.loads(blob)
        for entry in entries:
            shape = SHAPES[entry[1]]
            found = tuple(map(type, entry))
            if found != shape and not (entry[1] in "fsd" and found == (*shape, dict)):
                raise ValueError(f"{entry!r} is no entry")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise BlobCorrupt(f"the blob {digest} is not a directory: {error}") from None
    return entries


def files(tree: Tree) -> Iterator[tuple[str, str, int]]:
    """(path, sha256, size) of every file whose blob is its content."""
    todo = [("", tree)]
    while todo:
        prefix, folder = todo.pop()
        for entry in folder:
            if entry[1] == "f":
                yield prefix + entry[0], entry[3], entry[4]
            elif entry[1] == "d":
                todo.append((f"{prefix}{entry[0]}/", entry[3]))


def reachable(root: str, store: Source) -> set[str]:
    """Every blob that this root needs: what a collector must keep."""
    found = {root}
    todo = [root]
    while todo:
        digest = todo.pop()
        for entry in parse(digest, store.get(digest)):
            if entry[1] == "d" and entry[3] not in found:
                todo.append(entry[3])
            if entry[1] in "fsd":
                found.add(entry[3])
    return found


def form(data: bytes) -> tuple[str, bytes]:
    """The kind and the blob of a file with this content, as a scan would have them."""
    if len(data) <= SPARSE_FROM:
        return "f", data
    filled = sum(
        end - start for base in range(0, len(data), WINDOW) for start, end in filled_pages(data[base : base + WINDOW])
    )
    return ("s", sparse(data)) if 2 * filled <= len(data) else ("f", data)


def sparse(data: bytes) -> bytes:
    """The blob of a file that is mostly zeros."""
    out = bytearray()
    for base in range(0, len(data), WINDOW):
        window = data[base : base + WINDOW]
        for start, end in filled_pages(window):
            out += run_head(base + start, window[start:end]) + window[start:end]
    return bytes(out)


MAX_NAME_BYTES = 255
MAX_DEPTH = 100


def check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise BadPath(f"{name!r} cannot be a file's name")


def seed(contents: Mapping[str, bytes], store: Sink) -> str:
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


Known = dict[int, dict[str, list[Any]]]  # entries by name, of each folder by the identity of its list


def place(tree: Tree, folders: list[str], entry: list[Any], path: str, known: Known | None = None) -> None:
    """`known`: of the same tree, for who places many: each folder is gone through once."""
    known = {} if known is None else known
    tree = below(tree, folders, path, known)
    names = _names(tree, known)
    if entry[0] in names:
        raise BadPath(f"{path!r} is there twice, or is both a file and a folder")
    names[entry[0]] = entry
    tree.append(entry)


def below(tree: Tree, folders: list[str], path: str, known: Known) -> Tree:
    """The last of the folders, each made where there is none. Raises BadPath where one is something else."""
    for name in folders:
        names = _names(tree, known)
        if name not in names:
            names[name] = [name, "d", 0o755, []]
            tree.append(names[name])
        if names[name][1] != "d":
            raise BadPath(f"{path!r} goes through {name!r}, which is not a folder")
        tree = names[name][3]
    return tree


def _names(tree: Tree, known: Known) -> dict[str, list[Any]]:
    if id(tree) not in known:
        known[id(tree)] = {each[0]: each for each in tree}
    return known[id(tree)]
