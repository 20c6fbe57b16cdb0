from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import RealIo
from kvtier.direct import SpanReader
from kvtier.reads import Readers
from tests.kvtier.support import FaultyIo


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hanging reads wait for; opened at the end, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


def test_results_keep_the_order_of_the_items() -> None:
    readers = Readers(4, 30.0, "test")
    assert readers.map(lambda item: item * 2, range(50)) == [item * 2 for item in range(50)]
    readers.close()


def test_a_read_that_hangs_is_given_up_and_the_others_are_not(gate: threading.Event) -> None:
    readers = Readers(2, 0.05, "test")

    def read(item: int) -> int:
        if item == 0:
            gate.wait()
        return item

    assert readers.map(read, range(6)) == [None, 1, 2, 3, 4, 5]
    assert readers.map(read, [7]) == [7]
    gate.set()
    readers.close()


def test_while_every_thread_hangs_reads_are_misses_at_once_and_afterwards_they_are_served(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = Readers(2, 0.05, "test")
    started: list[int] = []

    def hang(item: int) -> int:
        started.append(item)
        gate.wait()
        return item

    assert readers.map(hang, [1, 2, 3]) == [None, None, None]
    with monkeypatch.context() as patch:
        patch.setattr(readers._pool, "submit", None)  # nothing is even tried
        assert readers.map(hang, [4]) == [None]
    assert sorted(started) == [1, 2]  # 3 was taken out of the queue
    gate.set()
    answers = [readers.map(lambda item: item, [5]) for _ in range(2)]
    while answers[-1] == [None]:  # until the kernel, so to say, has answered
        answers.append(readers.map(lambda item: item, [5]))
    assert answers[-1] == [5]
    readers.close()


def test_an_error_of_a_read_is_its_callers() -> None:
    readers = Readers(1, 30.0, "test")
    with pytest.raises(ZeroDivisionError):
        readers.map(lambda item: 1 // item, [0])
    readers.close()


# --- past the page cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("offset", "size"), [(0, 10), (4096, 4096), (4095, 2), (5000, 20_000), (29_990, 10)])
def test_spans_of_any_place_and_length_are_read_exactly(tmp_path: Path, direct: bool, offset: int, size: int) -> None:
    path = tmp_path / "file"
    content = os.urandom(30_000)
    path.write_bytes(content)
    assert SpanReader(RealIo(), direct).read(path, offset, size) == content[offset : offset + size]


@pytest.mark.parametrize("direct", [True, False])
def test_what_a_short_file_lacks_is_zero(tmp_path: Path, direct: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    assert SpanReader(RealIo(), direct).read(path, 4990, 5000) == b"x" * 10 + bytes(4990)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("offset", "sizes"), [(4096, [4096, 8192]), (100, [4096]), (4096, [100, 5000])])
def test_memory_of_any_length_is_filled_in_order(tmp_path: Path, direct: bool, offset: int, sizes: list[int]) -> None:
    path, content = tmp_path / "file", os.urandom(30_000)
    path.write_bytes(content)
    memory = memoryview(mmap.mmap(-1, 30_000))
    rooms = [memory[start : start + size] for start, size in zip((0, 8192), sizes, strict=False)]
    SpanReader(RealIo(), direct).fill(path, offset, rooms)
    assert b"".join(rooms) == content[offset : offset + sum(sizes)]


@pytest.mark.parametrize("at", ["open", "read"])
def test_memory_is_filled_through_the_cache_where_there_is_no_direct_access(tmp_path: Path, at: str) -> None:
    path, content = tmp_path / "file", os.urandom(8192)
    path.write_bytes(content)
    room = memoryview(mmap.mmap(-1, 8192))
    SpanReader(NoDirect(at), True).fill(path, 0, [room])
    assert room == content


class NoDirect(FaultyIo):
    """A file system that refuses direct access, when a file is opened or when it is read."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at, self.direct_fds, self.opened_direct = at, set(), 0  # type: ignore[var-annotated]

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_DIRECT:
            self.opened_direct += 1
            if self.at == "open":
                raise OSError(errno.EINVAL, "Invalid argument")
        fd = super().open(path, flags & ~os.O_DIRECT, mode)
        self.direct_fds.discard(fd)
        if flags & os.O_DIRECT:
            self.direct_fds.add(fd)
        return fd

    def read_at(self, fd: int, buffers: list, offset: int) -> int:  # type: ignore[type-arg]
        if fd in self.direct_fds:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().read_at(fd, buffers, offset)


def test_a_file_system_without_direct_access_is_read_through_the_cache_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"y" * 9000)
    io = NoDirect("open")
    spans = SpanReader(io, True)
    assert spans.read(path, 100, 200) == spans.read(path, 200, 200) == b"y" * 200
    assert not spans.direct
    assert io.opened_direct == 1


def test_a_read_that_is_refused_is_done_through_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"y" * 9000)
    assert SpanReader(NoDirect("read"), True).read(path, 100, 200) == b"y" * 200


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"y" * 9000)
    before = len(os.listdir("/proc/self/fd"))
    for at in ("open", "read"):
        SpanReader(NoDirect(at), True).read(path, 0, 9000)
    with pytest.raises(FileNotFoundError):
        SpanReader(RealIo(), True).read(tmp_path / "absent", 0, 10)
    assert len(os.listdir("/proc/self/fd")) == before
