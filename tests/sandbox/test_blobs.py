from __future__ import annotations

import hashlib
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
