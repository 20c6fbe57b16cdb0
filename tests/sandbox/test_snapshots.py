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
FILES = st.builds(lambda mode, n: ["f", mode, f"{n:064x}", n], st.sampled_from([0o644, 0o755, 0]), st.integers(0, 9))
LINKS = st.builds(lambda target: ["l", target], NAMES)
LEAVES = st.one_of(FILES, LINKS)
MODES = st.sampled_from([0o755, 0o500])
TREES = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=4),
    lambda inner: st.dictionaries(
        NAMES, st.one_of(LEAVES, st.builds(lambda mode, d: ["d", mode, d], MODES, inner)), max_size=4
    ),
    max_leaves=12,
)


def listed(tree: dict[str, list]) -> Tree:  # type: ignore[type-arg]
    return [
        [name, "d", entry[1], listed(entry[2])] if entry[0] == "d" else [name, *entry]
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
        else:
            assert name not in place or (step[0] == "file" and place[name][0] == "f")
            new = {"dir": ["d", 0o700, {}], "link": ["l", *step[2:]], "file": ["f", step[2] if len(step) > 2 else 0]}
            place[name] = new[step[0]] if step[0] != "file" else ["f", step[2], step[4], step[3]]
    return listed(root)


def _as_dict(tree: Tree) -> dict:  # type: ignore[type-arg]
    return {entry[0]: ["d", entry[2], _as_dict(entry[3])] if entry[1] == "d" else entry[1:] for entry in tree}


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
