from __future__ import annotations

import io
import tarfile

import pytest

from sandbox import BadPath, BlobStore, Sandbox, SandboxUsageError, seed_tar, snapshots
from tests.sandbox.conftest import bash

OUTSIDE = [
    ("../x", tarfile.REGTYPE, ""),
    ("/etc/x", tarfile.REGTYPE, ""),
    ("a/../../x", tarfile.REGTYPE, ""),
    ("link", tarfile.SYMTYPE, "/etc/passwd"),
    ("link", tarfile.SYMTYPE, "../x"),
    ("a/b/link", tarfile.SYMTYPE, "../../../x"),
    ("hard", tarfile.LNKTYPE, "/etc/passwd"),
    ("hard", tarfile.LNKTYPE, "../x"),
    ("hard", tarfile.LNKTYPE, "nowhere"),
    ("device", tarfile.CHRTYPE, ""),
    ("disk", tarfile.BLKTYPE, ""),
    ("pipe", tarfile.FIFOTYPE, ""),
    ("fine/x", tarfile.REGTYPE, ""),
]


def archive(*members: tuple[str, bytes, str], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            info.mode = 0o4755
            content = name.encode() if kind == tarfile.REGTYPE else b""
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize(("name", "kind", "target"), OUTSIDE)
def test_a_hostile_member_is_refused_and_named_and_nothing_is_written(
    store: BlobStore, name: str, kind: bytes, target: str
) -> None:
    data = archive(("fine", tarfile.REGTYPE, ""), (name, kind, target))
    with pytest.raises(BadPath) as refusal:
        seed_tar(data, store)
    assert repr(name) in str(refusal.value) or repr(target) in str(refusal.value)
    assert list(store) == []


def test_a_file_under_a_link_is_refused(store: BlobStore) -> None:
    data = archive(("d", tarfile.DIRTYPE, ""), ("link", tarfile.SYMTYPE, "d"), ("link/x", tarfile.REGTYPE, ""))
    with pytest.raises(BadPath, match="goes through 'link'"):
        seed_tar(data, store)


@pytest.mark.parametrize("data", [b"", b"not a tar", archive(("a", tarfile.REGTYPE, ""))[:600]])
def test_a_broken_archive_is_refused(store: BlobStore, data: bytes) -> None:
    with pytest.raises(SandboxUsageError, match="cannot be read"):
        seed_tar(data, store)


def test_an_archive_that_grows_beyond_the_limit_is_refused_before_it_is_read(store: BlobStore) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("zeros")
        info.size = 50_000_000
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    with pytest.raises(SandboxUsageError, match="more than"):
        seed_tar(buffer.getvalue(), store, limit_bytes=1_000_000)
    assert list(store) == []


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
async def test_a_plain_archive_becomes_the_workspace(sandbox: Sandbox, store: BlobStore, mode: str) -> None:
    data = archive(
        ("./src/main.py", tarfile.REGTYPE, ""),
        ("empty", tarfile.DIRTYPE, ""),
        ("src/link", tarfile.SYMTYPE, "../src/main.py"),
        ("copy", tarfile.LNKTYPE, "./src/main.py"),
        mode=mode,
    )
    root = seed_tar(data, store)
    await sandbox.restore(root, store)
    look = await bash(sandbox, "find . ! -name . -printf '%P %y %m\\n' | sort; cat copy src/link")
    assert look.output.decode().splitlines() == [
        "copy f 755",
        "empty d 755",
        "src d 755",
        "src/link l 777",
        "src/main.py f 755",
        "./src/main.py./src/main.py",
    ]
    assert await sandbox.snapshot(store) == root
    assert snapshots.reachable(root, store) == set(store)
