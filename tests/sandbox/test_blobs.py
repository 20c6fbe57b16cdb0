from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
        store.flush()
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
    store.flush()
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
    replace, other = os.replace, BlobStore(store.root)

    def noted(source: object, target: object) -> None:
        replace(source, target)  # type: ignore[arg-type]
        seen.append([other.has(name) for name in names])

    monkeypatch.setattr(os, "replace", noted)
    assert store.put_many(blobs) == names
    store.flush()
    assert seen == [[True] * n + [False] * (40 - n) for n in range(1, 41)]


@pytest.mark.parametrize("call", ["fsync", "fdatasync", "write"])
def test_a_write_that_fails_leaves_nothing(store: BlobStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store.put(b"before")
    store.flush()
    many = [str(n).encode() * (1 << 20 if call == "fsync" else 1) for n in range(20)]
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="space"):
            store.put_many(many)
    assert len(list(store)) == 1
    assert store.sweep() == 0
    store.put_many(many)
    store.flush()
    assert len(list(store)) == 21


POWER_LOSS = """
import os, sys
from pathlib import Path
from sandbox import BlobStore
from sandbox.journal import Journal
Journal._place_forever = lambda self: None  # there has been no time yet
store = BlobStore(Path(sys.argv[1]))
for word in sys.argv[2:]:
    store.put(word.encode())
os.kill(os.getpid(), 9)
"""


def lost(store: BlobStore, *words: str) -> list[str]:
    """Puts the words in a process that is killed; one of them was half in its place. Their hashes."""
    ended = subprocess.run([sys.executable, "-c", POWER_LOSS, str(store.root), *words], cwd=Path(__file__).parents[2])
    assert ended.returncode == -9
    digests = [hashlib.sha256(word.encode()).hexdigest() for word in words]
    store.path(digests[0]).parent.mkdir()
    store.path(digests[0]).write_bytes(b"")
    return digests


def test_what_was_promised_and_is_not_in_its_place_is_there_for_everybody_and_comes_to_its_place(
    store: BlobStore,
) -> None:
    digests = lost(store, "one", "two", "three")
    assert [store.get(digest) for digest in digests[1:]] == [b"two", b"three"]
    assert list(store) == digests[:1]
    assert store.whole
    store.sweep()
    assert sorted(store) == sorted(digests)
    assert [store.get(digest) for digest in digests] == [b"one", b"two", b"three"]
    assert not store.whole  # what they name may have been removed since
    assert list((store.root / "journal").iterdir()) == []


def test_a_record_that_was_cut_off_ends_its_journal_and_those_before_it_count(store: BlobStore) -> None:
    digests = lost(store, "one", "two")
    (path,) = (store.root / "journal").iterdir()
    os.truncate(path, path.stat().st_size - 1)
    store.sweep()
    assert store.get(digests[0]) == b"one"
    with pytest.raises(BlobMissing):
        store.get(digests[1])


def test_the_journal_of_a_process_that_lives_is_left_alone(store: BlobStore) -> None:
    store.put(b"mine")
    (path,) = (store.root / "journal").iterdir()
    BlobStore(store.root).sweep()
    assert path.exists()


def test_the_journal_is_emptied_when_every_file_is_durable_and_not_before(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    may, began, placed = threading.Event(), threading.Event(), []
    place = BlobStore._place

    def slow(self: BlobStore, blobs: dict[str, bytes]) -> None:
        began.set()
        may.wait()
        placed.extend(blobs)
        place(self, blobs)

    monkeypatch.setattr(BlobStore, "_place", slow)
    store = BlobStore(store.root)
    digests = [store.put(b"one")]
    began.wait()
    digests.append(store.put(b"two"))
    (path,) = (store.root / "journal").iterdir()
    assert path.stat().st_size == 2 * 40 + 6
    assert [store.get(digest) for digest in digests] == [b"one", b"two"]
    assert all(map(store.has, digests))
    may.set()
    store.flush()
    assert placed == digests
    assert path.stat().st_size == 0


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("can't start new thread")])
def test_a_disk_that_takes_no_files_loses_nothing_and_is_asked_again(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("sandbox.journal.RETRY_S", 0.01)
    replace, refused = os.replace, threading.Event()

    def full(*_: object) -> None:
        refused.set()
        raise error

    monkeypatch.setattr(os, "replace", full)
    digest = store.put(b"one")
    refused.wait()
    assert store.get(digest) == BlobStore(store.root).get(digest) == b"one"
    monkeypatch.setattr(os, "replace", replace)
    store.flush()
    assert list(store) == [digest]
    assert list(store.root.rglob("*.part")) == []


def test_writers_at_the_same_time_lose_nothing_of_the_journal(store: BlobStore) -> None:
    words = [[f"{writer} {n}".encode() for n in range(30)] for writer in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda mine: [store.put(word) for word in mine], words))
    store.flush()
    assert all(store.get(hashlib.sha256(word).hexdigest()) == word for mine in words for word in mine)
    assert [path.stat().st_size for path in (store.root / "journal").iterdir()] == [0]
