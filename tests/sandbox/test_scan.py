"""The agent's look at a workspace, in this process: what it remembers, and what verifying finds."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import snapshots
from sandbox.agent import scan
from sandbox.agent.content import hashed
from sandbox.agent.errors import Refused
from sandbox.agent.files import blobs_of
from sandbox.agent.scan import Folder, Scan
from sandbox.agent.workspace import Workspace, set_xattrs, write_filled

Before = dict[str, Folder]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """On the file system that workspaces are on, where a look at once after a change is trusted."""
    monkeypatch.setattr(scan, "SETTLED_NS", -1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def look(
    folder: Path, before: Scan | None = None, *, mapped: set[int] | None = frozenset(), verify: bool = False
) -> Scan:  # type: ignore[assignment]
    known: Before = {} if before is None else {each.path: each for each in before.folders}
    return Scan(Workspace(str(folder)), known, mapped, verify)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were opened to be read."""
    names: list[str] = []

    def noted(fd: int, name: str, mode: int, flags: int) -> int:
        names.append(name)
        return os.open(name, flags, dir_fd=fd)

    monkeypatch.setattr(scan, "opened", noted)
    return names


def test_only_what_changed_is_read_again(folder: Path, opened: list[str]) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in "12":
            (folder / name / number).write_text(name + number)
    first = look(folder)
    assert sorted(opened) == ["1", "1", "2", "2"]
    opened.clear()
    (folder / "a" / "2").write_text("other")
    second = look(folder, first)
    assert opened == ["2"]
    assert second.root != first.root
    assert [each.path for each in second.folders if each.digest != each.before] == ["", "a/"]
    assert second.root == look(folder).root


def test_a_folder_that_only_lost_or_won_a_name_is_another(folder: Path, opened: list[str]) -> None:
    (folder / "a").write_text("1")
    first = look(folder)
    (folder / "b").write_text("2")
    second = look(folder, first)
    (folder / "b").unlink()
    third = look(folder, second)
    assert first.root == third.root != second.root
    assert opened == ["a", "b"]


def test_a_file_changed_within_one_tick_of_its_look_is_read_again(
    folder: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "SETTLED_NS", 3600 * 10**9)
    (folder / "a").write_text("1")
    first = look(folder)
    look(folder, first)
    assert opened == ["a", "a"]


def test_what_may_have_changed_unseen_is_read_every_time(folder: Path, opened: list[str]) -> None:
    (folder / "a").write_text("1")
    (folder / "b").write_text("2")
    first = look(folder)
    opened.clear()
    second = look(folder, first, mapped={(folder / "a").stat().st_ino})
    assert opened == ["a"]
    look(folder, second)
    assert opened == ["a", "a"]  # what was read while it was mapped is not remembered
    opened.clear()
    look(folder, first, mapped=None)
    assert opened == ["a", "b"]


def test_verifying_finds_what_changed_behind_its_times(folder: Path) -> None:
    """Through a mapping that nobody told of: its second write changes no time."""
    (folder / "mapped").write_bytes(bytes(4096))
    (folder / "other").write_text("same")
    with open(folder / "mapped", "r+b") as f, mmap.mmap(f.fileno(), 0) as window:
        window[0:1] = b"1"
        first = look(folder)
        window[0:1] = b"2"
        assert look(folder, first).root == first.root
        verified = look(folder, first, verify=True)
    assert verified.stale == ["mapped"]
    assert verified.root == look(folder).root != first.root
    assert look(folder, verified).root == verified.root
    assert look(folder, verified, verify=True).stale == []


def test_verifying_finds_a_memory_that_is_wrong(folder: Path) -> None:
    (folder / "d").mkdir()
    (folder / "d" / "f").write_text("true")
    first = look(folder)
    seen, entry = first.folders[1].files["f"]
    entry[3] = "0" * 64
    first.folders[1].files["f"] = seen, entry
    assert look(folder, first, verify=True).stale == ["d/f"]


def test_the_root_is_the_one_that_the_controller_computes(folder: Path) -> None:
    (folder / "d").mkdir(mode=0o700)
    (folder / "d" / "f").write_bytes(b"x" * 40_000)
    (folder / "holes").write_bytes(b"\1" + bytes(100_000) + b"\2")
    os.link(folder / "d" / "f", folder / "z")
    os.symlink("z", folder / "l")
    os.mkfifo(folder / "pipe")
    os.chmod(folder / "d" / "f", 0o600)
    os.chmod(folder / "holes", 0o644)
    blob = snapshots.sparse((folder / "holes").read_bytes())
    digest = hashlib.sha256(b"x" * 40_000).hexdigest()
    tree = [
        ["d", "d", 0o700, [["f", "h", "z"]]],
        ["holes", "s", 0o644, hashlib.sha256(blob).hexdigest(), 100_002],
        ["l", "l", "z"],
        ["pipe", "o"],
        ["z", "f", 0o600, digest, 40_000],
    ]
    assert look(folder).root == snapshots.pack(tree)[0]
    assert look(folder).folders[0].others == ["pipe"]


@pytest.mark.parametrize("content", [b"", b"\0", b"x", bytes(32 << 10), bytes((32 << 10) + 1), bytes(3 << 20)])
def test_the_form_of_a_file_depends_on_its_content_alone(folder: Path, content: bytes) -> None:
    """Whether its zeros take room or are holes: a restore may turn one into the other."""
    found = set()
    for name in ("dense", "holes"):
        with open(folder / name, "w+b", buffering=0) as f:
            if name == "dense":
                f.write(content)
            else:
                write_filled(f.fileno(), memoryview(content), 0)
            found.add(hashed(f.fileno(), len(content)))
    ((kind, digest),) = found
    assert kind == ("s" if len(content) > 32 << 10 else "f")
    assert digest == hashlib.sha256(snapshots.sparse(content) if kind == "s" else content).hexdigest()


def test_a_folder_that_denies_its_owner_is_read_and_denies_again(folder: Path) -> None:
    (folder / "shut" / "in").mkdir(parents=True)
    (folder / "shut" / "in" / "f").write_text("x")
    (folder / "shut" / "in").chmod(0)
    (folder / "shut").chmod(0o100)
    workspace = Workspace(str(folder))
    first = Scan(workspace, {}, set(), False)
    assert first.folders[0].entries[0][2] == 0o100
    workspace.relock()
    assert (folder / "shut").stat().st_mode & 0o777 == 0o100
    assert Scan(workspace, {each.path: each for each in first.folders}, set(), False).root == first.root
    workspace.relock()


def test_a_file_system_without_attributes_has_none_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "f").write_text("x")
    plain = look(folder).root

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    for name in ("listxattr", "getxattr", "setxattr", "removexattr"):
        monkeypatch.setattr(os, name, unsupported)
    assert look(folder).root == plain
    workspace = Workspace(str(folder))
    fd = workspace.open_root(os.O_PATH)
    assert not workspace.apply(fd, "f", ["xattrs", "f", {"user.a": "00"}], memoryview(b""))
    os.close(fd)


def test_attributes_beyond_a_bound_are_left_out_and_named(folder: Path) -> None:
    (folder / "f").write_text("x")
    with open(folder / "f") as f:
        try:
            set_xattrs(f.fileno(), {f"user.{n}": "00" * 40_000 for n in "ab"})
        except OSError as error:
            pytest.skip(f"no extended attributes here: {error}")
    found = look(folder)
    assert found.left_out == [("f", "its extended attributes are more than 65536 bytes")]
    assert len(found.folders[0].entries[0]) == 5


def test_a_folder_that_moves_while_it_is_read_is_not_left_through_its_new_parent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    honest = Scan._look

    def moving(self: Scan, fd: int, found: Folder) -> list[tuple[str, int]]:
        below = honest(self, fd, found)
        if found.path == "a/b/":
            (folder / "a" / "b").rename(folder / "b")
        return below

    monkeypatch.setattr(Scan, "_look", moving)
    with pytest.raises(Refused, match="moved"):
        look(folder)


def test_blobs_are_sent_as_far_as_they_fit_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["sandbox.agent.files"], "MAX_READ", 10)
    folders = [Folder(None, str(n), {}) for n in range(3)]
    for each in folders:
        each.entries = [["name", "l", "target"]]
    found, body = blobs_of(iter(folders))
    assert len(found) == 1
    assert body == b'[["name","l","target"]]'
