"""The contract of files, snapshots and restores, over every driver."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sandbox import BadPath, BlobMissing, BlobStore, FileMissing, OperationFailed, Sandbox, snapshots
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
    await bash(sandbox, "sleep 1000 & until grep -q sleep /proc/$!/comm; do :; done")
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


async def test_a_tree_deeper_than_any_path_is_refused_by_a_snapshot_and_removed_by_a_restore(
    sandbox: Sandbox, store: BlobStore
) -> None:
    await sandbox.put("kept", b"kept")
    root = await sandbox.snapshot(store)
    code = "import os\nfor n in range(3000):\n  os.mkdir('d'); open('f', 'w').close(); os.chdir('d')"
    assert (await python(sandbox, code)).ok
    with pytest.raises(BadPath, match="nested deeper"):
        await sandbox.snapshot(store)
    await sandbox.restore(root, store)
    assert [entry.name for entry in await sandbox.list()] == ["kept"]


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


async def test_a_file_changed_through_a_mapping_is_in_the_next_snapshot(sandbox: Sandbox, store: BlobStore) -> None:
    code = """
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
