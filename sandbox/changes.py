"""What has to be done to a workspace to make it another: the steps of a restore."""

from __future__ import annotations

from typing import Any

Tree = list[list[Any]]
Steps = list[list[Any]]


def changes(have: Tree, want: Tree) -> tuple[Steps, Steps]:
    """Steps that turn `have` into `want`: (in this order, then the modes of folders, deepest first).

    Steps are ["rm", path], ["dir", path], ["link", path, target], ["mode", path, mode], ["xattrs", path, values],
    ["file", path, mode, size, sha256], ["sparse", path, mode, size, sha256] and ["hard", path, first name]. Folders
    that denied their owner are open, since a scan opens them; their modes are always set again.
    """
    steps: Steps = []
    modes: Steps = []
    hard: list[tuple[str, str, bool]] = []
    todo = [("", have, want)]
    while todo:
        prefix, old_tree, new_tree = todo.pop()
        old = {entry[0]: entry for entry in old_tree}
        new = {entry[0]: entry for entry in new_tree}
        steps += [["rm", prefix + name] for name, entry in old.items() if not _stays(entry, new.get(name))]
        for name, entry in new.items():
            path, before = prefix + name, old.get(name)
            kept = before if before is not None and _stays(before, entry) else None
            if entry[1] == "h":
                hard.append((path, entry[2], kept is not None))
            elif entry[1] == "d":
                _folder(path, kept, entry, steps, modes)
                todo.append((path + "/", kept[3] if kept is not None else [], entry[3]))
            else:
                steps += _leaf(path, kept, entry)
    written = {step[1] for step in steps if step[0] in ("file", "sparse")}
    for path, first, stays in hard:
        if not stays or first in written:  # a name that stays would still be that of the old file
            steps += [*([["rm", path]] if stays else []), ["hard", path, first]]
    return steps, modes[::-1]


def _folder(path: str, kept: list[Any] | None, entry: list[Any], steps: Steps, modes: Steps) -> None:
    if kept is None:
        steps.append(["dir", path])
    if (kept or [])[4:] != entry[4:]:
        steps.append(["xattrs", path, entry[4] if entry[4:] else {}])
    if kept is None or kept[2] != entry[2] or entry[2] & 0o700 != 0o700:
        modes.append(["mode", path, entry[2]])


def _leaf(path: str, kept: list[Any] | None, entry: list[Any]) -> Steps:
    if entry[1] == "l":
        return [] if kept is not None else [["link", path, entry[2]]]
    steps: Steps = []
    if kept is None:
        steps.append(["file" if entry[1] == "f" else "sparse", path, entry[2], entry[4], entry[3]])
    elif kept[2] != entry[2]:
        steps.append(["mode", path, entry[2]])
    if (kept or [])[5:] != entry[5:]:
        steps.append(["xattrs", path, entry[5] if entry[5:] else {}])
    return steps


def _stays(old: list[Any], new: list[Any] | None) -> bool:
    """A folder stays a folder; a file stays when its content does, a link when it says the same."""
    if new is None or old[1] != new[1]:
        return False
    if old[1] == "d":
        return True
    return bool(old[3:5] == new[3:5] if old[1] in "fs" else old[2] == new[2])
