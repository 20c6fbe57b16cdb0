from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandbox import BlobCorrupt, BlobMissing, BlobStore


def test_a_blob_comes_back_under_the_hash_of_its_bytes(store: BlobStore) -> None:
    digest = store.put(b"hello")
    assert digest == hashlib.sha256(b"hello").hexdigest()
    assert store.has(digest)
    assert store.get(digest) == b"hello"
    assert store.path(digest).parent.name == digest[:2]


def test_a_blob_that_is_not_there_is_named(store: BlobStore) -> None:
    with pytest.raises(BlobMissing, match="0000"):
        store.get("0" * 64)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 65])
def test_what_is_not_a_hash_names_no_file(store: BlobStore, name: str) -> None:
    with pytest.raises(BlobMissing, match="not a sha256"):
        store.has(name)


def test_a_flipped_bit_and_a_cut_end_are_found(store: BlobStore) -> None:
    for damage in (lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: data[:-1]):
        digest = store.put(b"some bytes")
        store.path(digest).write_bytes(damage(b"some bytes"))
        with pytest.raises(BlobCorrupt, match=digest):
            store.get(digest)
        store.remove(digest)


def test_many_writers_of_the_same_blobs_leave_each_once_and_whole(store: BlobStore) -> None:
    blobs = [b"%d" % n * 1000 for n in range(40)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(store.put_many, [blobs] * 8))
    assert all(answer == answers[0] for answer in answers)
    assert sorted(store) == sorted(answers[0])
    assert [store.get(digest) for digest in answers[0]] == blobs
    assert list(store.root.rglob("*.part")) == []


def test_a_removed_blob_is_gone_and_its_size_is_told(store: BlobStore) -> None:
    digest = store.put(b"12345")
    assert store.remove(digest) == 5
    assert not store.has(digest)
    assert store.remove(digest) == 0


def test_what_a_crash_left_half_written_is_swept_and_never_listed(store: BlobStore) -> None:
    digest = store.put(b"whole")
    (store.path(digest).parent / "0123456789abcdef.part").write_bytes(b"half")
    assert list(store) == [digest]
    assert store.sweep() == 1
    assert store.sweep() == 0
    assert store.get(digest) == b"whole"


def test_a_store_that_was_never_written_is_empty(store: BlobStore) -> None:
    assert list(store) == []
    assert store.sweep() == 0


def test_blobs_become_visible_in_the_order_in_which_they_are_put(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So whoever finds a folder finds what is in it, whenever the writer ends."""
    blobs = [str(n).encode() for n in range(40)]
    names = [hashlib.sha256(blob).hexdigest() for blob in blobs]
    seen = []
    replace = os.replace

    def noted(source: object, target: object) -> None:
        replace(source, target)  # type: ignore[arg-type]
        seen.append([store.has(name) for name in names])

    monkeypatch.setattr(os, "replace", noted)
    assert store.put_many(blobs) == names
    assert seen == [[True] * n + [False] * (40 - n) for n in range(1, 41)]


def test_a_write_that_fails_leaves_nothing(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    store.put(b"before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        store.put_many([str(n).encode() for n in range(20)])
    assert len(list(store)) == 1
    assert store.sweep() == 0


def test_a_store_is_not_whole_while_blobs_are_removed_nor_after_that_was_interrupted(store: BlobStore) -> None:
    digests = store.put_many([b"a", b"b", b"c", b"d"])
    assert store.whole
    with store.removing(everything=False):
        store.remove(digests[0])
        assert not store.whole
    assert store.whole
    with pytest.raises(BlobMissing), store.removing(everything=False):
        _ = store.remove(digests[1]) + store.remove("no digest")
    assert not store.whole
    with store.removing(everything=False):
        store.remove(digests[2])
    assert not store.whole  # what the interrupted one left is not known to this one
    with store.removing(everything=True):
        store.remove(digests[3])
    assert store.whole
