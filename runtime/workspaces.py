"""What a workspace holds, read from its snapshot: no sandbox is needed, and any checkpoint is as near as the last.

Functions take a root and whatever gives blobs by their hash, so that they run where the blobs are: in the API where it
shares the node's folder of them, at a node otherwise (`runtime.steps.errands`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

from runtime.errors import InvalidRequest, NotFound, TooLarge
from sandbox import BadPath, BlobMissing, snapshots

MAX_FILE_BYTES: Final = 64 << 20  # of one file that is read over HTTP; more goes out with an export
_KINDS: Final = {"f": "file", "s": "file", "h": "file", "d": "folder", "l": "link"}
_RUN: Final = struct.Struct(">QQ")


Blobs = snapshots.Source
Answer = tuple[dict[str, Any], bytes | None]


class InMemory(dict[str, bytes]):
    """Blobs of a workspace that no node has stored yet."""

    def get(self, digest: str) -> bytes:  # type: ignore[override]
        try:
            return self[digest]
        except KeyError:
            raise BlobMissing(f"the blob {digest} is not there") from None


def of_files(contents: Mapping[str, str]) -> tuple[str, InMemory]:
    """The workspace that a session's files make: its root and its blobs."""
    data = {path: text.encode() for path, text in contents.items()}
    root, folders = snapshots.pack(snapshots.plan(data))
    return root, InMemory({**folders, **{hashlib.sha256(one).hexdigest(): one for one in data.values()}})


def answered(blobs: Blobs, kind: str, asked: Mapping[str, Any]) -> Answer:
    """What is asked of a workspace (list, read, blob, size, diff), where its blobs are. Blocking. Raises
    BlobMissing."""
    if kind == "list":
        found = listing(
            blobs, asked["root"], asked["path"], deep=asked["deep"], after=asked["after"], limit=asked["limit"]
        )
        return found, None
    if kind == "read":
        return read(blobs, asked["root"], asked["path"], asked["at"], asked["most"])
    if kind == "blob":
        return {}, blobs.get(asked["digest"])
    if kind == "size":
        files, size = size_bytes(blobs, asked["root"])
        return {"files": files, "bytes": size}, None
    return {"data": difference(blobs, asked["from"], asked["to"])}, None


def listing(blobs: Blobs, root: str, path: str, *, deep: bool, after: str, limit: int) -> dict[str, Any]:
    """Entries below a folder in the order of their paths, and whether there are more. Raises NotFound."""
    tree = _tree(blobs, root)
    folder = _find(tree, path) if path else ["", "d", 0o755, tree]
    if folder is None:
        raise NotFound(f"there is no {path!r} in the workspace")
    prefix = f"{path}/" if path and folder[1] == "d" else path
    found = [shown for shown in _walk(folder, prefix, _by_path(tree), deep) if shown["path"] > after]
    found.sort(key=lambda one: str(one["path"]))
    return {"data": found[:limit], "has_more": len(found) > limit}


def read(blobs: Blobs, root: str, path: str, at: int = 0, most: int = MAX_FILE_BYTES) -> tuple[dict[str, Any], bytes]:
    """About a file, and its bytes from `at` on. Raises NotFound, TooLarge; InvalidRequest where it is none."""
    tree = _tree(blobs, root)
    entry = _find(tree, path)
    if entry is None:
        raise NotFound(f"there is no file {path!r} in the workspace")
    if entry[1] == "h":
        entry = _by_path(tree)[entry[2]]
    if entry[1] not in "fs":
        raise InvalidRequest(f"path: {path!r} is a {_KINDS[entry[1]]}, not a file", param="path")
    if entry[4] > MAX_FILE_BYTES:
        raise TooLarge(
            f"{path!r} has {entry[4]} bytes; at most {MAX_FILE_BYTES} are read at a time: export the session instead"
        )
    blob = blobs.get(entry[3])
    data = expanded(blob, entry[4]) if entry[1] == "s" else blob
    return {"size": entry[4], "mode": _mode(entry[2]), "digest": entry[3]}, data[at : at + most]


def difference(blobs: Blobs, before: str, after: str) -> list[dict[str, Any]]:
    """What was added, removed and changed between two workspaces, by path; sizes in bytes where there are any."""
    old, new = (_flat(_tree(blobs, root)) for root in (before, after))
    found = []
    for path in sorted(old.keys() | new.keys()):
        was, now = old.get(path), new.get(path)
        if was == now:
            continue
        change = "added" if was is None else "removed" if now is None else "changed"
        about = now or was
        assert about is not None
        sizes = {"size_before": was["size"] if was else None, "size": now["size"] if now else None}
        found.append({"path": path, "change": change, "kind": about["kind"], **sizes})
    return found


def size_bytes(blobs: Blobs, root: str) -> tuple[int, int]:
    """How many files there are, and how many bytes they have in all."""
    sizes = [entry[4] for entry in _by_path(_tree(blobs, root)).values()]
    return len(sizes), sum(sizes)


def edited(
    blobs: Blobs, root: str, *, put: Mapping[str, list[Any]] | None = None, remove: str | None = None
) -> tuple[str, dict[str, bytes]]:
    """The root with files put in (path to [kind, mode, sha256, size]) or one removed, and the folders that are new.

    What stands where a file comes gives way if it is a file or a link. Raises BadPath, NotFound.
    """
    tree = _tree(blobs, root)
    first_names = {entry[2] for entry in _entries(tree) if entry[1] == "h"}
    for path in [remove] if remove is not None else list(put or ()):
        touched = [name for name in first_names if name == path or name.startswith(f"{path}/")]
        if touched:
            _give_each_its_own(tree)
            break
    if remove is not None and not _take_out(tree, remove):
        raise NotFound(f"there is no {remove!r} in the workspace")
    for path, leaf in (put or {}).items():
        names = path.split("/")
        there = _find(tree, path)
        if there is not None and there[1] == "d":
            raise BadPath(f"{path!r} is a folder; remove it first")
        if there is not None:
            _take_out(tree, path)
        snapshots.place(tree, names[:-1], [names[-1], *leaf], path)
    return snapshots.pack(tree)


def overlaid(blobs: Blobs, root: str, over: str) -> tuple[str, dict[str, bytes]]:
    """The root with all of another one over it. Raises BadPath where a file would replace a folder."""
    tree, upper = _tree(blobs, root), _tree(blobs, over)
    _give_each_its_own(tree)
    _merge(tree, upper, "")
    return snapshots.pack(tree)


def _merge(tree: snapshots.Tree, upper: snapshots.Tree, prefix: str) -> None:
    there = {entry[0]: entry for entry in tree}
    for entry in upper:
        old = there.get(entry[0])
        if old is not None and (old[1] == "d") != (entry[1] == "d"):
            raise BadPath(f"{prefix + entry[0]!r} is a {_KINDS[old[1]]} in the workspace and none in the archive")
        if old is not None and entry[1] == "d":
            old[2:3] = entry[2:3]
            _merge(old[3], entry[3], f"{prefix}{entry[0]}/")
            continue
        if old is not None:
            tree.remove(old)
        tree.append(entry)


def expanded(blob: bytes, size: int) -> bytes:
    """The content of a file that is kept as its runs."""
    data, at = bytearray(size), 0
    while at < len(blob):
        start, length = _RUN.unpack_from(blob, at)
        at += _RUN.size
        data[start : start + length] = blob[at : at + length]
        at += length
    return bytes(data)


def printable(path: str) -> str:
    """A path as text: bytes that are no UTF-8 are escaped."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _tree(blobs: Blobs, root: str) -> snapshots.Tree:
    return snapshots.load(root, blobs)


def _find(tree: snapshots.Tree, path: str) -> list[Any] | None:
    found: list[Any] | None = None
    for name in path.split("/"):
        found = next((entry for entry in tree if entry[0] == name), None)
        if found is None:
            return None
        tree = found[3] if found[1] == "d" else []
    return found


def _take_out(tree: snapshots.Tree, path: str) -> bool:
    *folders, name = path.split("/")
    for folder in folders:
        found = next((entry for entry in tree if entry[0] == folder and entry[1] == "d"), None)
        if found is None:
            return False
        tree = found[3]
    found = next((entry for entry in tree if entry[0] == name), None)
    if found is not None:
        tree.remove(found)
    return found is not None


def _entries(tree: snapshots.Tree, prefix: str = "") -> Iterator[list[Any]]:
    return (entry for _, entry in _paths(tree, prefix))


def _paths(tree: snapshots.Tree, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    todo = [(prefix, tree)]
    while todo:
        base, folder = todo.pop()
        for entry in folder:
            yield base + entry[0], entry
            if entry[1] == "d":
                todo.append((f"{base}{entry[0]}/", entry[3]))


def _by_path(tree: snapshots.Tree) -> dict[str, list[Any]]:
    """Files by the path of their first name."""
    return {path: entry for path, entry in _paths(tree) if entry[1] in "fs"}


def _give_each_its_own(tree: snapshots.Tree) -> None:
    """Other names of one file become files of their own: one of them is about to change or go."""
    firsts = _by_path(tree)
    for entry in _entries(tree):
        if entry[1] == "h":
            entry[1:] = firsts[entry[2]][1:]


def _walk(folder: list[Any], prefix: str, firsts: Mapping[str, list[Any]], deep: bool) -> Iterator[dict[str, Any]]:
    if folder[1] != "d":
        yield _shown(prefix, folder, firsts)
    elif deep:
        yield from (_shown(path, entry, firsts) for path, entry in _paths(folder[3], prefix))
    else:
        yield from (_shown(prefix + entry[0], entry, firsts) for entry in folder[3])


def _shown(path: str, entry: list[Any], firsts: Mapping[str, list[Any]]) -> dict[str, Any]:
    file = firsts[entry[2]] if entry[1] == "h" else entry
    is_file = file[1] in "fs"
    return {
        "path": printable(path),
        "kind": _KINDS[entry[1]],
        "size": file[4] if is_file else None,
        "mode": None if entry[1] == "l" else _mode(file[2]),
        "sha256": file[3] if file[1] == "f" else None,
        "target": printable(entry[2]) if entry[1] == "l" else None,
    }


def _flat(tree: snapshots.Tree) -> dict[str, dict[str, Any]]:
    firsts = _by_path(tree)
    found = {}
    for path, entry in _paths(tree):
        file = firsts[entry[2]] if entry[1] == "h" else entry
        shown = _shown(path, entry, firsts)
        found[shown["path"]] = {**shown, "digest": file[3] if file[1] in "fs" else None}
    return found


def _mode(bits: int) -> str:
    return f"{bits:04o}"
