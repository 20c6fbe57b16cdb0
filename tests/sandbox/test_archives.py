from __future__ import annotations

import gzip
import io
import lzma
import os
import tarfile
import zipfile

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


def member(name: str, content: bytes = b"", mode: int = 0o644, **about: object) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(content), mode
        for key, value in about.items():
            setattr(info, key, value)
        tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


HOSTILE = {
    "a name of 300 bytes": (member("x" * 300), "longer than"),
    "a name of 300 bytes in a folder": (member("d/" + "é" * 150 + "/f"), "longer than"),
    "10,000 folders deep": (member("d/" * 10_000 + "f"), "longer than"),
    "a folder 10,000 deep": (member("d/" * 10_000, type=tarfile.DIRTYPE), "longer than"),
    "a name twice": (archive(("a", tarfile.REGTYPE, ""), ("a", tarfile.REGTYPE, "")), "twice"),
    "a file and then a folder": (archive(("a", tarfile.REGTYPE, ""), ("a", tarfile.DIRTYPE, "")), "not a folder"),
    "a file and then something in it": (
        archive(("a", tarfile.REGTYPE, ""), ("a/b", tarfile.REGTYPE, "")),
        "not a folder",
    ),
    "a link that leads out by another": (
        archive(("in", tarfile.SYMTYPE, "."), ("in/out", tarfile.SYMTYPE, "../..")),
        "goes through 'in'|outside",
    ),
    "a hard link to a link": (archive(("l", tarfile.SYMTYPE, "x"), ("h", tarfile.LNKTYPE, "l")), "no file"),
    "a hard link to what comes later": (archive(("h", tarfile.LNKTYPE, "a"), ("a", tarfile.REGTYPE, "")), "no file"),
    "a socket's kind": (member("s", type=b"s"), "."),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_workspace_can_hold_is_refused_and_nothing_is_written(store: BlobStore, what: str) -> None:
    data, complaint = HOSTILE[what]
    with pytest.raises(SandboxUsageError, match=complaint):
        seed_tar(data, store)
    assert list(store) == []


def extended(data: bytes, times: int = 1) -> bytes:
    """Headers that say more of the next one."""
    info = tarfile.TarInfo("more")
    info.type, info.size = tarfile.XGLTYPE, len(data)
    return (info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)) * times


BIG = member("zeros", bytes(40 << 20))
UNSOUND = {
    "a gzip that is cut off": gzip.compress(member("a", b"x" * 100_000))[:-50],
    "a gzip with a wrong check": gzip.compress(member("a", b"x"))[:-8] + bytes(8),
    "a gzip with broken data": gzip.compress(member("a", os.urandom(9999)))[:30] + b"\xff" * 5000,
    "a tar that is cut off": member("a", b"x" * 100_000)[:50_000],
    "an xz that is cut off": lzma.compress(member("a", b"x" * 100_000))[:-20],
    "a size below zero": member("a", b"x", pax_headers={"size": "-5"}),
    "a size beyond all": member("a", b"x", pax_headers={"size": str(1 << 62)}),
    "a size that is no number": member("a", b"x", pax_headers={"size": "many"}),
    "a header of fifty megabytes": gzip.compress(member("a", pax_headers={"comment": "c" * (50 << 20)})),
    "a header of digits, each of which could begin a length": extended(b"1" * 900_000) + member("a"),
    "headers of headers": extended(b"", 1500) + member("a"),
    "a million to one": gzip.compress(gzip.compress(BIG) + BIG),
}


@pytest.mark.parametrize("what", UNSOUND)
def test_an_archive_that_lies_of_its_sizes_is_refused_before_anything_is_written(store: BlobStore, what: str) -> None:
    with pytest.raises(SandboxUsageError, match="archive"):
        seed_tar(UNSOUND[what], store, limit_bytes=1 << 20)
    assert list(store) == []


def test_a_zip_archive_is_refused_with_the_format_that_is_wanted(store: BlobStore) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("a", b"x")
    with pytest.raises(SandboxUsageError, match="zip archive; give a tar archive"):
        seed_tar(buffer.getvalue(), store)


async def test_setuid_is_dropped_and_what_is_mostly_zeros_stays_small(sandbox: Sandbox, store: BlobStore) -> None:
    data = gzip.compress(member("tool", b"\1" + bytes(3_000_000), 0o6755))
    root = seed_tar(data, store)
    assert sum(len(store.get(digest)) for digest in store) < 10_000
    await sandbox.restore(root, store)
    assert (await bash(sandbox, "stat -c '%a %s' tool")).output == b"755 3000001\n"
    assert await sandbox.snapshot(store) == root
