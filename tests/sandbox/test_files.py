"""The contract of files, snapshots and restores, over every driver."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sandbox import (
    BadPath,
    BlobMissing,
    BlobStore,
    FakeDriver,
    FileMissing,
    OperationFailed,
    Sandbox,
    SandboxSpec,
    snapshots,
)
from tests.sandbox.conftest import Make, bash, python

HOSTILE = ["../x", "/etc/passwd", "a/../../x", "..", "/work/../etc/passwd", "/proc/self/environ", "a\0b"]
TREE = r"""
mkdir -p src/deep/er empty secret
printf 'hello' > src/a.txt
printf '#!/bin/sh\n' > src/run.sh; chmod 755 src/run.sh
printf 'hidden' > secret/locked; chmod 000 secret/locked; chmod 500 secret
ln -s a.txt src/link
ln -s /etc/passwd src/outward
head -c 5000000 /dev/zero | tr '\0' 'z' > src/deep/er/large
printf '' > nothing
printf 'odd' > "$(printf 'name-\xff\xfe')"
mkfifo pipe
"""
LOOK = r"""
find . ! -name . ! -type p -printf '%P %y %m %l\n' | sort
find . -type f -perm -400 -exec sha256sum {} + | sort
"""


async def test_a_file_put_is_the_file_that_is_got(sandbox: Sandbox) -> None:
    data = os.urandom(9_000_000)
    await sandbox.put("deep/er/file.bin", data, 0o600)
    assert await sandbox.get("deep/er/file.bin") == data
    assert await sandbox.get("/work/deep/er/file.bin") == data
    (entry,) = await sandbox.list("deep/er")
    assert (entry.name, entry.kind, entry.size_bytes, entry.mode) == ("file.bin", "file", len(data), 0o600)


async def test_a_put_replaces_the_whole_file_or_nothing(sandbox: Sandbox) -> None:
    await sandbox.put("f", b"long old content")
    await sandbox.put("f", b"new")
    assert await sandbox.get("f") == b"new"
    assert [entry.name for entry in await sandbox.list()] == ["f"]


@pytest.mark.parametrize("path", HOSTILE)
async def test_a_path_out_of_the_workspace_is_refused_and_named(sandbox: Sandbox, path: str) -> None:
    for operation in (sandbox.put(path, b"x"), sandbox.get(path), sandbox.list(path)):
        with pytest.raises(BadPath) as refusal:
            await operation
        assert repr(path) in str(refusal.value)


async def test_no_link_is_followed_neither_at_the_end_nor_on_the_way(sandbox: Sandbox) -> None:
    await bash(sandbox, "ln -s /etc/passwd file; ln -s /etc folder; ln -s / root; ln -s /proc/self/environ environ")
    for path in ("file", "folder/passwd", "root/etc/passwd", "environ"):
        with pytest.raises(BadPath):
            await sandbox.get(path)
    with pytest.raises(BadPath):
        await sandbox.put("folder/x", b"")
    await sandbox.put("file", b"replaced")
    assert await sandbox.get("file") == b"replaced"
    assert Path("/etc/passwd").read_bytes() != b"replaced"


async def test_a_pipe_is_refused_and_does_not_block(sandbox: Sandbox) -> None:
    await bash(sandbox, "mkfifo pipe")
    with pytest.raises(BadPath, match="not a regular file"):
        await sandbox.get("pipe")


async def test_a_missing_file_is_named(sandbox: Sandbox) -> None:
    with pytest.raises(FileMissing, match="nowhere"):
        await sandbox.get("nowhere")


async def test_a_folder_cannot_be_overwritten_by_a_file(sandbox: Sandbox) -> None:
    await bash(sandbox, "mkdir folder")
    with pytest.raises(OperationFailed):
        await sandbox.put("folder", b"x")
    assert [entry.name for entry in await sandbox.list()] == ["folder"]


async def test_a_snapshot_restored_into_another_sandbox_is_the_same_tree(make: Make, store: BlobStore) -> None:
    _, first = await make()
    assert (await bash(first, TREE)).ok
    root = await first.snapshot(store)
    _, second = await make()
    await second.restore(root, store)
    assert (await bash(second, LOOK)).output == (await bash(first, LOOK)).output
    assert await second.snapshot(store) == root


async def test_a_restore_brings_back_what_was_deleted_changed_or_replaced_by_another_kind(
    sandbox: Sandbox, store: BlobStore
) -> None:
    await bash(sandbox, TREE)
    before = (await bash(sandbox, LOOK)).output
    root = await sandbox.snapshot(store)
    change = """
        rm -r src/deep; printf 'HELLO' > src/a.txt; chmod 644 src/run.sh; rm src/link; mkdir src/link; touch src/link/x
        rmdir empty; printf x > empty; chmod 700 secret; rm -f secret/locked; mkdir new; touch new/file; rm pipe
        rm nothing; ln -s / nothing; mkdir shut; touch shut/in; chmod 000 shut
    """
    assert (await bash(sandbox, change)).ok
    await sandbox.restore(root, store)
    assert (await bash(sandbox, LOOK)).output == before
    assert await sandbox.snapshot(store) == root


async def test_a_restore_merges_nothing_that_is_not_in_the_root(sandbox: Sandbox, store: BlobStore) -> None:
    await sandbox.put("one", b"1")
    first = await sandbox.snapshot(store)
    await sandbox.put("two", b"2")
    second = await sandbox.snapshot(store)
    await sandbox.restore(first, store)
    assert [entry.name for entry in await sandbox.list()] == ["one"]
    await sandbox.restore(second, store)
    assert [entry.name for entry in await sandbox.list()] == ["one", "two"]


async def test_an_empty_workspace_has_a_root_that_empties_a_full_one(sandbox: Sandbox, store: BlobStore) -> None:
    empty = await sandbox.snapshot(store)
    assert empty == snapshots.seed({}, store)
    await bash(sandbox, TREE)
    await sandbox.restore(empty, store)
    assert await sandbox.list() == []


async def test_the_same_files_have_the_same_root_however_they_came_to_be(make: Make, store: BlobStore) -> None:
    _, first = await make()
    _, second = await make()
    await bash(first, "printf b > b; printf a > a; mkdir d; printf c > d/c")
    await bash(second, "mkdir d; printf c > d/c; printf a > a; printf x > b; printf b > b; touch -d 2001-01-01 a")
    root = snapshots.seed({"a": b"a", "b": b"b", "d/c": b"c"}, store)
    assert await first.snapshot(store) == await second.snapshot(store) == root


async def test_a_seeded_root_becomes_the_workspace(sandbox: Sandbox, store: BlobStore) -> None:
    root = snapshots.seed({"src/main.py": b"print('hi')", "README": b""}, store)
    await sandbox.restore(root, store)
    assert (await bash(sandbox, "python3 src/main.py")).output == b"hi\n"


async def test_a_restore_kills_what_runs_and_says_who_it_was(sandbox: Sandbox, store: BlobStore) -> None:
    root = await sandbox.snapshot(store)
    await bash(sandbox, "sleep 1000 & until grep -q sleep /proc/$!/comm; do :; done", keep_background=True)
    killed = await sandbox.restore(root, store)
    assert [name.split()[1] for name in killed] == ["sleep"]
    assert await sandbox.killall() == []


async def test_a_restore_from_a_store_without_a_blob_changes_nothing(sandbox: Sandbox, store: BlobStore) -> None:
    await sandbox.put("mine", b"kept")
    with pytest.raises(BlobMissing):
        await sandbox.restore("0" * 64, store)
    root = snapshots.seed({"a": b"only here"}, store)
    for digest in store:
        if store.get(digest) == b"only here":
            store.remove(digest)
    with pytest.raises(BlobMissing):
        await sandbox.restore(root, store)
    assert await sandbox.get("mine") == b"kept"


async def test_a_tree_as_deep_as_a_path_can_name_is_kept(make: Make, store: BlobStore) -> None:
    _, first = await make()
    code = "import os\nfor n in range(1900):\n  os.mkdir('d'); os.chdir('d')\nopen('bottom', 'w').write('here')"
    assert (await python(first, code)).ok
    root = await first.snapshot(store)
    assert root.left_out == ()
    assert snapshots.reachable(root, store) == set(store)
    _, second = await make()
    await second.restore(root, store)
    assert await second.get("d/" * 1900 + "bottom") == b"here"
    assert await second.snapshot(store) == root


async def test_what_is_deeper_than_any_path_is_left_out_and_named_and_a_restore_removes_it(
    sandbox: Sandbox, store: BlobStore
) -> None:
    await sandbox.put("kept", b"kept")
    before = await sandbox.snapshot(store)
    code = "import os\nfor n in range(3000):\n  os.mkdir('d'); open('f', 'w').close(); os.chdir('d')"
    assert (await python(sandbox, code)).ok
    root = await sandbox.snapshot(store)
    assert [line.rpartition("/")[2] for line in root.left_out] == [
        f"{name}: its path is longer than 4000 bytes" for name in "df"
    ]
    assert (await bash(sandbox, "echo x > later")).ok
    assert await sandbox.snapshot(store) != root
    await sandbox.restore(root, store)
    again = await sandbox.snapshot(store)
    assert (again, again.left_out) == (root, ())
    await sandbox.restore(before, store)
    assert [entry.name for entry in await sandbox.list()] == ["kept"]


async def test_names_of_one_file_are_names_of_one_file_after_a_restore(make: Make, store: BlobStore) -> None:
    _, first = await make()
    await bash(first, "echo 1 > one; mkdir a z; ln one a/two; ln one z/three; echo 1 > alone; chmod 640 one")
    root = await first.snapshot(store)
    _, second = await make()
    await second.restore(root, store)
    look = "echo 2 > a/two; cat one z/three alone; stat -c '%n %h %a' one a/two z/three alone"
    result = await bash(second, look)
    assert result.output.decode().split("\n")[:-1] == [
        *("2", "2", "1"),
        *("one 3 640", "a/two 3 640", "z/three 3 640", "alone 1 644"),
    ]
    assert await second.snapshot(store) != root


UNTIED = [
    "rm one; echo 1 > one; chmod 640 one",  # one content, no longer one file
    "echo 2 > one",
    "ln alone b; rm one; ln alone one",
    "rm one a/two; mv z/three one",
    "chmod 600 a/two",
    "mv a b; ln one c",
    "rm -r a; ln -s z a; rm z/three; mkdir z/three",
]


async def test_a_restore_unties_and_ties_the_names_of_files(sandbox: Sandbox, store: BlobStore) -> None:
    await bash(sandbox, "echo 1 > one; mkdir a z; ln one a/two; ln one z/three; echo 1 > alone; chmod 640 one")
    root = await sandbox.snapshot(store)
    for change in UNTIED:
        assert (await bash(sandbox, change)).ok
        changed = await sandbox.snapshot(store)
        assert changed != root, change
        await sandbox.restore(root, store)
        assert await sandbox.snapshot(store) == root, change
        result = await bash(sandbox, "stat -c %h one a/two z/three alone; stat -c %i one a/two z/three | uniq")
        assert result.output.split()[:4] == [b"3", b"3", b"3", b"1"], change
        assert len(result.output.split()) == 5, change
        await sandbox.restore(changed, store)
        assert await sandbox.snapshot(store) == changed, change
        await sandbox.restore(root, store)


ATTRIBUTES = """
import os
os.mkdir("d")
for name in ("f", "shut", "d/g"):
    open(name, "w").write("x")
os.setxattr("f", "user.kind", bytes(range(256)))
os.setxattr("f", "user.empty", b"")
os.setxattr("d", "user.folder", b"1")
os.setxattr("shut", "user.kind", b"2")
os.chmod("shut", 0)
os.chmod("d", 0o500)
"""
SHOW_ATTRIBUTES = """
import os
os.chmod("shut", 0o600)
for name in ("f", "d", "shut", "d/g"):
    print(name, [(each, os.getxattr(name, each)) for each in sorted(os.listxattr(name))])
os.chmod("shut", 0)
"""


async def test_extended_attributes_are_kept_and_those_that_are_in_no_root_removed(make: Make, store: BlobStore) -> None:
    _, first = await make()
    made = await python(first, ATTRIBUTES)
    if b"not supported" in made.output:
        pytest.skip("the workspace's file system has no extended attributes; tmpfs has them since Linux 6.6")
    assert made.ok, made
    root = await first.snapshot(store)
    shown = (await python(first, SHOW_ATTRIBUTES)).output
    assert shown.count(b"user.") == 4
    _, second = await make()
    assert (await second.restore(root, store)).left_out == ()
    assert (await python(second, SHOW_ATTRIBUTES)).output == shown
    change = "import os; os.removexattr('f', 'user.empty'); os.setxattr('f', 'user.new', b'1')\n"
    change += "os.chmod('d', 0o700); os.setxattr('d/g', 'user.new', b'1'); os.removexattr('d', 'user.folder')"
    assert (await python(second, change)).ok
    assert await second.snapshot(store) != root
    await second.restore(root, store)
    assert (await python(second, SHOW_ATTRIBUTES)).output == shown
    assert await second.snapshot(store) == root


async def test_a_file_that_is_mostly_holes_takes_no_more_room_than_it_holds(make: Make, store: BlobStore) -> None:
    _, first = await make()
    write = "truncate -s 1T vast; printf here | dd of=vast bs=1 seek=500000000000 conv=notrunc status=none"
    assert (await bash(first, f"{write}; truncate -s 300000 hollow; head -c 200000 /dev/zero > zeros")).ok
    root = await first.snapshot(store)
    assert sum(len(store.get(digest)) for digest in store) < 20_000
    _, second = await make()
    await second.restore(root, store)
    look = (
        "dd if=vast bs=1 skip=500000000000 count=4 status=none; stat -c ' %s' vast hollow zeros; du -k vast | cut -f1"
    )
    head, *sizes, blocks = (await bash(second, look)).output.decode().split()
    assert (head, sizes) == ("here", ["1099511627776", "300000", "200000"])
    assert int(blocks) <= 16
    assert await second.get("zeros") == bytes(200_000)
    assert await second.snapshot(store) == root


async def test_a_file_with_some_holes_takes_no_more_room_either(make: Make, store: BlobStore) -> None:
    _, first = await make()
    code = "f = open('f', 'wb')\nfor n in range(600): f.seek(n * 10_000); f.write(b'x' * 4500)"
    assert (await python(first, code)).ok
    root = await first.snapshot(store)
    before = int((await bash(first, "du -k f")).output.split()[0])
    _, second = await make()
    await second.restore(root, store)
    assert int((await bash(second, "du -k f")).output.split()[0]) <= before
    assert await second.get("f") == await first.get("f")


async def test_a_large_file_is_restored_whole_whatever_its_mode(make: Make, store: BlobStore) -> None:
    _, first = await make()
    data = os.urandom(20_000_000)
    await first.put("large", data, 0o444)
    root = await first.snapshot(store)
    _, second = await make()
    await second.restore(root, store)
    assert await second.get("large") == data
    assert await second.snapshot(store) == root


async def test_modes_have_their_sticky_bit_and_no_setuid(make: Make, store: BlobStore) -> None:
    _, first = await make()
    await bash(first, "mkdir open; chmod 1777 open; touch tool; chmod 6755 tool")
    root = await first.snapshot(store)
    _, second = await make()
    await second.restore(root, store)
    assert (await bash(second, "stat -c %a open tool")).output == b"1777\n755\n"


async def test_links_are_kept_as_text_wherever_they_lead(make: Make, store: BlobStore) -> None:
    _, first = await make()
    await bash(first, "ln -s nowhere dangling; ln -s /etc/passwd out; ln -s loop loop; ln -s ../../.. up; ln -s . here")
    root = await first.snapshot(store)
    _, second = await make()
    await second.restore(root, store)
    links = "for f in dangling out loop up here; do readlink $f; done"
    assert (await bash(second, links)).output.split() == [b"nowhere", b"/etc/passwd", b"loop", b"../../..", b"."]
    assert await second.snapshot(store) == root


async def test_a_snapshot_of_one_driver_is_the_same_workspace_on_another(
    sandbox: Sandbox, store: BlobStore, tmp_path: Path
) -> None:
    assert (await bash(sandbox, TREE + "ln src/a.txt twin; truncate -s 20M vast")).ok
    root = await sandbox.snapshot(store)
    other = FakeDriver(tmp_path)
    handle = await other.create(SandboxSpec("other", "session", "tenant", 1))
    try:
        fork = await other.attach(handle)
        await fork.restore(root, store)
        assert (await bash(fork, LOOK)).output == (await bash(sandbox, LOOK)).output
        assert await fork.snapshot(store) == root
        await bash(fork, "echo only here > fork")
        assert await sandbox.snapshot(store) == root
        await fork.close()
    finally:
        await other.release(handle)


async def test_a_workspace_kept_in_the_older_form_is_restored(sandbox: Sandbox, store: BlobStore) -> None:
    """As before hard links, attributes and holes were kept: a file of zeros is its content."""
    zeros = store.put(bytes(100_000))
    text = store.put(b"hello")
    inner = store.put(snapshots.encode([["zeros", "f", 0o600, zeros, 100_000]]))
    root = store.put(snapshots.encode([["a", "f", 0o644, text, 5], ["d", "d", 0o755, inner], ["l", "l", "a"]]))
    await sandbox.restore(root, store)
    assert (await bash(sandbox, "cat l; stat -c %s,%a d/zeros")).output == b"hello100000,600\n"
    await bash(sandbox, "echo changed > d/zeros; rm l")
    await sandbox.restore(root, store)
    assert await sandbox.get("d/zeros") == bytes(100_000)


async def test_a_snapshot_taken_while_a_tool_writes_shows_one_moment(sandbox: Sandbox, store: BlobStore) -> None:
    code = """
import os
print("up", flush=True)
n = 0
while True:
    n += 1
    for name in "ab":
        with open(name + ".new", "w") as f: f.write(str(n))
        os.rename(name + ".new", name)
"""
    call = await sandbox.start("writer", ["python3", "-c", code])
    async for _ in call:
        break
    for _ in range(10):
        tree = snapshots.load(await sandbox.snapshot(store), store)
        content = {entry[0]: store.get(entry[3]) for entry in tree}
        if {"a", "b"} <= set(content):
            assert int(content["a"]) - int(content["b"]) in (0, 1)
    assert (await asyncio.wait_for(sandbox.lookup("writer"), 10)) is not None
    await call.kill()


async def test_a_call_that_was_frozen_goes_on(sandbox: Sandbox, store: BlobStore) -> None:
    call = await sandbox.start("k", ["bash", "-c", "echo up; while [ ! -e go ]; do sleep 0.01; done; echo woken"])
    async for _ in call:
        break
    await sandbox.snapshot(store)
    await sandbox.put("go", b"")
    assert (await call.result()).output == b"up\nwoken\n"


async def test_a_start_during_a_snapshot_waits_for_its_end(sandbox: Sandbox, store: BlobStore) -> None:
    await bash(sandbox, "head -c 9000000 /dev/urandom > large")
    root, result = await asyncio.gather(sandbox.snapshot(store), bash(sandbox, "echo x > late; echo done"))
    assert result.ok
    assert [entry[0] for entry in snapshots.load(root, store)] in (["large"], ["large", "late"])


@pytest.mark.parametrize("hidden", [False, True])
async def test_a_file_changed_through_a_mapping_is_in_the_next_snapshot(
    sandbox: Sandbox, store: BlobStore, hidden: bool
) -> None:
    """`hidden`: by a process that lets nobody see what it has mapped."""
    code = f"import ctypes; ctypes.CDLL(None).prctl(4, {int(not hidden)})"
    code += """
import mmap, os, sys, time
with open("mapped", "r+b") as f:
    m = mmap.mmap(f.fileno(), 0)
m[0:1] = b"1"
print("one", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
m[0:1] = b"2"
print("two", flush=True)
time.sleep(1000)
"""
    await sandbox.put("mapped", b"0" * 4096)
    call = await sandbox.start("k", ["python3", "-c", code])
    said = [chunk async for chunk in _until(call, b"one")]
    assert said
    first = await sandbox.snapshot(store)
    await sandbox.put("go", b"")
    assert [chunk async for chunk in _until(call, b"two")]
    second = await sandbox.snapshot(store)
    assert _content(first, "mapped", store)[:1] == b"1"
    assert _content(second, "mapped", store)[:1] == b"2"
    await call.kill()


async def test_a_second_snapshot_stores_only_what_changed(sandbox: Sandbox, store: BlobStore) -> None:
    await python(sandbox, "for i in range(50): open(f'f{i}', 'w').write(str(i))")
    await sandbox.snapshot(store)
    before = set(store)
    await sandbox.put("f7", b"changed")
    root = await sandbox.snapshot(store)
    assert len(set(store) - before) == 2  # the file and its folder
    assert snapshots.reachable(root, store) <= set(store)


async def _until(call, word):  # type: ignore[no-untyped-def]
    async for chunk in call:
        yield chunk
        if word in chunk.data:
            return


def _content(root: str, name: str, store: BlobStore) -> bytes:
    return next(store.get(entry[3]) for entry in snapshots.load(root, store) if entry[0] == name)


async def test_a_snapshot_stores_again_what_was_removed_from_the_store(sandbox: Sandbox, store: BlobStore) -> None:
    await bash(sandbox, "mkdir -p d/e; echo 1 > d/e/f; echo 2 > g")
    root = await sandbox.snapshot(store)
    whole = set(store)
    for digest in whole:
        store.remove(digest)
        assert await sandbox.snapshot(store) == root
        assert set(store) == whole


async def test_a_store_that_saw_nothing_of_a_sandbox_gets_all_of_it(sandbox: Sandbox, tmp_path: Path) -> None:
    await bash(sandbox, "mkdir -p d/e; echo 1 > d/e/f; echo 2 > g")
    first, second = BlobStore(tmp_path / "first"), BlobStore(tmp_path / "second")
    root = await sandbox.snapshot(first)
    assert await sandbox.snapshot(second) == root
    assert set(second) == set(first) == snapshots.reachable(root, second)


async def test_a_verifying_snapshot_has_the_same_root_and_nothing_to_report(sandbox: Sandbox, store: BlobStore) -> None:
    await bash(sandbox, TREE)
    root = await sandbox.snapshot(store)
    again = await sandbox.snapshot(store, verify=True)
    assert (again, again.stale, again.left_out) == (root, (), ())


async def test_a_restore_finds_what_a_process_promised_that_ended_before_it_was_in_its_place(
    sandbox: Sandbox, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._journal, "_place", never)
    root = snapshots.seed({"a/b.txt": b"promised", "c.txt": b"too"}, store)
    assert [path.name for path in store.root.iterdir()] == ["journal"]
    await sandbox.restore(root, BlobStore(store.root))
    assert await sandbox.get("a/b.txt") == b"promised"
