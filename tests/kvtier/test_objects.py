"""The contract of `Objects`, over a directory, a bucket and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier import Objects, S3Place, TierConfigError
from kvtier.objects import DirectoryObjects
from tests.kvtier.media import Medium
from tests.kvtier.support import FaultyIo


@pytest.fixture(params=["memory", "directory", "s3"])
def medium(request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[], S3Place]) -> Medium:
    return Medium(request.param, tmp_path, new_bucket)


@pytest.fixture
def objects(medium: Medium) -> Iterator[Objects]:
    opened = medium.objects()
    yield opened
    opened.close()


def contents(objects: Objects, prefix: str) -> dict[str, int]:
    return dict(objects.list(prefix))


def test_a_blob_comes_back_whole_and_is_listed_under_its_prefix(objects: Objects) -> None:
    assert objects.create("pages/00/a", [b"one", memoryview(b"two")])
    assert objects.create("marks/a", [b""])
    assert objects.read("pages/00/a") == b"onetwo"
    assert objects.read("marks/a") == b""
    assert objects.read("pages/00/b") is None
    assert contents(objects, "pages/") == {"pages/00/a": 6}
    assert contents(objects, "claims/") == {}


def test_a_name_that_exists_keeps_its_bytes(objects: Objects) -> None:
    assert objects.create("a/x", [b"first"])
    assert not objects.create("a/x", [b"second"])
    assert objects.read("a/x") == b"first"


def test_a_removed_name_is_free_again_and_removing_it_twice_is_no_error(objects: Objects) -> None:
    objects.create("a/x", [b"first"])
    objects.remove("a/x")
    objects.remove("a/x")
    assert contents(objects, "a/") == {}
    assert objects.create("a/x", [b"second"])


def test_more_names_than_one_page_of_a_listing(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.s3._LISTED_AT_ONCE", 7)
    for number in range(30):
        objects.create(f"many/{number}", [b"x"])
    assert len(contents(objects, "many/")) == 30


def test_of_many_writers_of_one_name_exactly_one_creates_it(medium: Medium) -> None:
    stores = [medium.objects() for _ in range(4)]
    barrier, won = threading.Barrier(4), []

    def write(number: int) -> None:
        barrier.wait(30)
        if stores[number].create("a/x", [bytes([number]) * 5000]):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert stores[0].read("a/x") == bytes([won[0]]) * 5000
    for store in stores:
        store.close()


def test_a_directory_that_vanishes_is_made_anew_by_the_next_write(tmp_path: Path) -> None:
    import shutil

    objects = DirectoryObjects(tmp_path / "shared")
    objects.create("pages/00/a", [b"x"])
    shutil.rmtree(tmp_path / "shared")
    assert objects.read("pages/00/a") is None
    assert contents(objects, "pages/") == {}
    assert objects.create("pages/00/a", [b"y"])
    assert objects.read("pages/00/a") == b"y"


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "link"])
def test_a_write_that_fails_leaves_neither_a_blob_nor_a_half_one(tmp_path: Path, operation: str) -> None:
    io = FaultyIo()
    objects = DirectoryObjects(tmp_path / "shared", io)
    io.fail(OSError(28, "No space left on device"), lambda seen, _: seen == operation)
    with pytest.raises(OSError, match="No space"):
        objects.create("pages/00/a", [b"x" * 100])
    io.heal()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert objects.create("pages/00/a", [b"x" * 100])


def test_a_store_that_does_not_answer_is_an_oserror(new_bucket: Callable[[], S3Place]) -> None:
    from kvtier.s3 import S3Objects

    place = new_bucket()
    gone = S3Objects(S3Place(place.bucket, endpoint_url="http://127.0.0.1:9", timeout_s=1))
    absent = S3Objects(S3Place("no-such-bucket", endpoint_url=place.endpoint_url))
    for objects in (gone, absent):
        for call in (
            lambda objects=objects: objects.create("a/x", [b"x"]),
            lambda objects=objects: list(objects.list("a/")),
            lambda objects=objects: objects.remove("a/x"),
        ):
            with pytest.raises(OSError, match=r"connect|does not exist"):
                call()
        objects.close()
    with pytest.raises(OSError, match="connect"):
        S3Objects(S3Place("bucket", endpoint_url="http://127.0.0.1:9", timeout_s=1)).read("a/x")


def test_a_bucket_in_an_impossible_place_is_refused_in_a_sentence() -> None:
    from kvtier.s3 import S3Objects

    with pytest.raises(TierConfigError, match="the bucket one cannot be used"):
        S3Objects(S3Place("one", endpoint_url="not a url"))


def test_a_store_that_overwrites_where_it_should_only_create_is_not_written_to(
    new_bucket: Callable[[], S3Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.s3 import S3Objects

    objects = S3Objects(new_bucket())
    put = objects._client.put_object
    monkeypatch.setattr(objects._client, "put_object", lambda IfNoneMatch, **rest: put(**rest))
    for _ in range(2):
        with pytest.raises(OSError, match="overwrites where it was asked to create only"):
            objects.create("a/x", [b"x"])
    assert contents(objects, "") == {}
    objects.close()
