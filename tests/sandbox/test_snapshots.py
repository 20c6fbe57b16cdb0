from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import BadPath, BlobCorrupt, BlobStore, snapshots
from sandbox.snapshots import Tree

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=6).filter(
    lambda name: name not in (".", "..")
)
XATTRS = st.sampled_from([[], [], [{"user.a": "00"}], [{"user.a": "01", "user.b": ""}]])
FILES = st.builds(
    lambda kind, mode, n, xattrs: [kind, mode, f"{n:064x}", n, *xattrs],
    st.sampled_from("fffs"),
    st.sampled_from([0o644, 0o755, 0]),
    st.integers(0, 9),
    XATTRS,
)
LINKS = st.builds(lambda target: ["l", target], NAMES)
LEAVES = st.one_of(FILES, LINKS)
MODES = st.sampled_from([0o755, 0o500])
TREES = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=4),
    lambda inner: st.dictionaries(
        NAMES,
        st.one_of(LEAVES, st.builds(lambda mode, d, xattrs: ["d", mode, d, *xattrs], MODES, inner, XATTRS)),
        max_size=4,
    ),
    max_leaves=12,
)


def listed(tree: dict[str, list]) -> Tree:  # type: ignore[type-arg]
    return [
        [name, "d", entry[1], listed(entry[2]), *entry[3:]] if entry[0] == "d" else [name, *entry]
        for name, entry in sorted(tree.items())
    ]


def applied(tree: Tree, steps: list[list]) -> Tree:  # type: ignore[type-arg]
    """What the agent does with steps, on nested dictionaries."""
    root = _as_dict(tree)
    for step in steps:
        *folders, name = step[1].split("/")
        place = root
        for folder in folders:
            assert place[folder][0] == "d"
            place = place[folder][2]
        if step[0] == "rm":
            del place[name]
        elif step[0] == "mode":
            place[name][1] = step[2]
        elif step[0] == "xattrs":
            place[name][3 if place[name][0] == "d" else 4 :] = [step[2]] if step[2] else []
        else:
            assert name not in place
            kinds = {"file": "f", "sparse": "s"}
            new = {"dir": ["d", 0o700, {}], "link": ["l", *step[2:]]}
            place[name] = new.get(step[0]) or [kinds[step[0]], step[2], step[4], step[3]]
    return listed(root)


def _as_dict(tree: Tree) -> dict:  # type: ignore[type-arg]
    return {
        entry[0]: ["d", entry[2], _as_dict(entry[3]), *entry[4:]] if entry[1] == "d" else entry[1:] for entry in tree
    }


@given(TREES, TREES)
def test_the_steps_between_two_trees_turn_one_into_the_other(have: dict, want: dict) -> None:  # type: ignore[type-arg]
    steps, modes = snapshots.changes(listed(have), listed(want))
    assert applied(listed(have), [*steps, *modes]) == listed(want)


@given(TREES)
def test_a_tree_needs_no_content_to_become_itself(tree: dict) -> None:  # type: ignore[type-arg]
    steps, modes = snapshots.changes(listed(tree), listed(tree))
    assert steps == []
    assert all(step[2] & 0o700 != 0o700 for step in modes)


@given(TREES)
def test_a_packed_tree_loads_as_it_was(tmp_path_factory: pytest.TempPathFactory, tree: dict) -> None:  # type: ignore[type-arg]
    store = BlobStore(tmp_path_factory.mktemp("blobs"))
    root, blobs = snapshots.pack(listed(tree))
    store.put_many(blobs.values())
    assert snapshots.load(root, store) == listed(tree)


def test_a_name_of_a_file_that_is_written_anew_is_tied_again() -> None:
    have = [["a", "f", 0o644, "0" * 64, 1], ["b", "h", "a"]]
    want = [["a", "f", 0o644, "1" * 64, 1], ["b", "h", "a"]]
    steps, _ = snapshots.changes(have, want)
    assert steps == [["rm", "a"], ["file", "a", 0o644, 1, "1" * 64], ["rm", "b"], ["hard", "b", "a"]]


@pytest.mark.parametrize("first", ["nowhere", "d", "../a", "b"])
def test_another_name_of_what_is_no_file_is_refused(store: BlobStore, first: str) -> None:
    inner = store.put(b"[]")
    root = store.put(json.dumps([["b", "h", first], ["d", "d", 0o755, inner]]).encode())
    with pytest.raises(BlobCorrupt, match="another name"):
        snapshots.load(root, store)


def test_a_tree_thousands_deep_is_packed_and_loaded(store: BlobStore) -> None:
    tree: Tree = [["bottom", "l", "x"]]
    for _ in range(5000):
        tree = [["d", "d", 0o755, tree]]
    root, blobs = snapshots.pack(tree)
    for digest, blob in blobs.items():  # thousands of syncs say nothing here
        path = store.path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blob)
    assert snapshots.pack(snapshots.load(root, store))[0] == root
    assert snapshots.reachable(root, store) == set(blobs)
    assert snapshots.changes(tree, []) == ([["rm", "d"]], [])
    steps, modes = snapshots.changes([], tree)
    assert (len(steps), len(modes), modes[-1]) == (5001, 5000, ["mode", "d", 0o755])


def test_the_blobs_of_a_tree_come_after_those_that_they_name() -> None:
    """Also where one folder is there twice, at different depths."""
    same: Tree = [["x", "d", 0o755, [["l", "l", "t"]]]]
    tree: Tree = [["a", "d", 0o755, same], ["b", "d", 0o755, [["c", "d", 0o755, same]]]]
    _, blobs = snapshots.pack(tree)
    seen: set[str] = set()
    for digest, blob in blobs.items():
        assert {entry[3] for entry in json.loads(blob) if entry[1] == "d"} <= seen
        seen.add(digest)


def test_the_root_of_a_workspace_is_the_one_it_always_had(store: BlobStore) -> None:
    """Sessions in a database name roots: their form is for ever."""
    root = snapshots.seed({"a": b"hello", "d/b": b""}, store)
    assert root == "95c2b1bc1acce084c9ae1a65f215e5cf5993d16ba075e2e00ff5e1272e1b2de9"


def test_sockets_and_pipes_are_in_no_root_and_a_restore_removes_them() -> None:
    assert snapshots.pack([["s", "o"]]) == snapshots.pack([])
    assert snapshots.changes([["s", "o"]], []) == ([["rm", "s"]], [])


def test_the_order_in_which_files_are_named_does_not_matter(store: BlobStore) -> None:
    files = {"b": b"1", "a/x": b"2", "a/y/z": b"3"}
    assert snapshots.seed(files, store) == snapshots.seed(dict(reversed(files.items())), store)


def test_an_empty_seed_has_a_root(store: BlobStore) -> None:
    root = snapshots.seed({}, store)
    assert snapshots.load(root, store) == []


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/passwd", "", ".", "..", "a//b", "a/", "a/.", "./a", "a\0b", "/", "a/../b"]
)
def test_a_hostile_name_is_refused_and_named_and_nothing_is_written(store: BlobStore, path: str) -> None:
    with pytest.raises(BadPath) as refusal:
        snapshots.seed({"fine": b"1", path: b"2"}, store)
    assert repr(path) in str(refusal.value)
    assert list(store) == []


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b", "a/b/c")])
def test_a_name_that_is_both_file_and_folder_is_refused(store: BlobStore, paths: tuple[str, str]) -> None:
    for order in (paths, reversed(paths)):
        with pytest.raises(BadPath):
            snapshots.seed(dict.fromkeys(order, b""), store)


@pytest.mark.parametrize("name", ["..", "a/b", "", ".", "/etc", "x\0y"])
def test_a_stored_tree_with_a_hostile_name_is_refused_before_it_reaches_a_sandbox(store: BlobStore, name: str) -> None:
    root = store.put(json.dumps([[name, "l", "target"]]).encode())
    with pytest.raises(BadPath):
        snapshots.load(root, store)


@pytest.mark.parametrize(
    "blob", [b"not json", b"7", b"[[]]", b'[["a"]]', b'[["a","d",493]]', b'[["a","x",1]]', b'[["a","f",1,2,3]]']
)
def test_a_blob_that_is_no_folder_is_refused(store: BlobStore, blob: bytes) -> None:
    root = store.put(blob)
    with pytest.raises(BlobCorrupt):
        snapshots.load(root, store)


def test_reachable_names_exactly_the_blobs_of_a_root(store: BlobStore) -> None:
    first = snapshots.seed({"a": b"1", "d/b": b"2"}, store)
    only_first = set(store)
    second = snapshots.seed({"a": b"1", "d/c": b"3"}, store)
    assert snapshots.reachable(first, store) == only_first
    assert snapshots.reachable(first, store) | snapshots.reachable(second, store) == set(store)
    assert store.put(b"1") in snapshots.reachable(second, store)
