"""What a watch saves a look at the workspace, and that nothing done to the files makes it see less than there is."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sandbox import BlobStore
from sandbox.agent import watch as watching
from sandbox.agent.again import Again, Memory
from sandbox.agent.processes import held, kill, mapped, processes
from sandbox.agent.scan import Scan
from sandbox.agent.watch import Watch
from sandbox.agent.workspace import Workspace
from tests.sandbox.conftest import Make, python
from tests.sandbox.mischief import Mischief, change_in_place, exchange, splice, tie

ANY_SEED = random.SystemRandom().randrange(1 << 32)


@pytest.fixture
def root() -> Iterator[Path]:
    """On the file system that workspaces are on."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def memory(root: Path) -> Iterator[Memory]:
    made = Memory(Workspace(str(root)))
    yield made
    made.watch.stop()


def truth(root: Path) -> str:
    """What a look finds that knows nothing and reads everything."""
    workspace = Workspace(str(root))
    found = Scan(workspace, {}, set(), True).root
    workspace.relock()
    return found


def look(memory: Memory, open_files: set[int] | None = None, shared: set[int] | None = None) -> Scan:
    """Whatever it looked at, it found what is there."""
    found = memory.look(shared or set(), open_files or set(), False)
    memory.workspace.relock()
    assert found.root == truth(Path(memory.workspace.root))
    return found


def play(root: Path, memory: Memory, seed: int, rounds: int) -> int:
    """Compares after every few things that a tool does; returns how often the watch was enough."""
    tool, enough = Mischief(root, seed), 0
    try:
        for number in range(rounds):
            for _ in range(tool.random.randrange(8)):
                tool.act()
            if tool.random.random() < 0.2:
                tool.end()
            scan = memory.look(tool.mapped(), tool.held(), False)
            memory.workspace.relock()
            assert scan.root == truth(root), f"seed {seed}, round {number}: {' '.join(tool.done)}"
            enough += isinstance(scan, Again)
            tool.done.append("|")
            for folder in [path for path in root.rglob("*") if path.is_dir() and not path.is_symlink()]:
                if folder.stat().st_mode & 0o700 != 0o700 and tool.random.random() < 0.5:
                    folder.chmod(0o755)
    finally:
        tool.end()
    return enough


@pytest.mark.parametrize("seed", [*range(1, 9), ANY_SEED], ids=lambda seed: "any" if seed == ANY_SEED else str(seed))
def test_a_look_with_a_watch_finds_what_a_whole_one_finds(root: Path, memory: Memory, seed: int) -> None:
    assert play(root, memory, seed, 60) > 10


def test_a_watch_whose_events_are_thrown_away_is_found_out(
    root: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Watch.touched
    monkeypatch.setattr(Watch, "touched", lambda self: None if honest(self) is None else {})
    with pytest.raises(AssertionError, match="seed 3, round"):
        play(root, memory, 3, 60)


@pytest.fixture
def settled(root: Path, memory: Memory) -> Path:
    """Two folders that were looked at, and are known."""
    for folder in ("a", "b"):
        (root / folder).mkdir()
        for name in "xyz":
            (root / folder / name).write_bytes(folder.encode() * 5000)
    look(memory)
    assert isinstance(look(memory), Again)
    return root


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that a look takes up."""
    names: list[str] = []
    honest = Scan._list

    def noting(self: Scan, fd: int, folder: object, seen: list, known: dict) -> None:  # type: ignore[type-arg]
        names.extend(each[0] for each in seen)
        honest(self, fd, folder, seen, known)  # type: ignore[arg-type]

    monkeypatch.setattr(Scan, "_list", noting)
    return names


def test_only_the_names_that_were_touched_are_looked_at(settled: Path, memory: Memory, noted: list[str]) -> None:
    (settled / "a" / "x").write_text("new")
    (settled / "a" / "more").write_text("new")
    (settled / "b" / "y").unlink()
    scan = memory.look(set(), set(), False)
    assert isinstance(scan, Again)
    assert sorted(noted) == ["more", "x"]
    assert [folder.path for folder in scan.folders if folder.digest != folder.before] == ["", "a/", "b/"]
    assert scan.root == truth(settled)


def overwrite(path: Path) -> None:
    with open(path, "r+b") as f:
        f.write(b"other")


def set_back(path: Path) -> None:
    st = path.stat()
    overwrite(path)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def allocate(path: Path) -> None:
    with open(path, "r+b") as f:
        os.posix_fallocate(f.fileno(), 5000, 100)


def send(path: Path) -> None:
    with open(__file__, "rb") as source, open(path, "r+b") as f:
        os.sendfile(f.fileno(), source.fileno(), 0, 100)


def copy_range(path: Path) -> None:
    with open(path.parent / "y", "r+b") as source, open(path, "r+b") as f:
        source.write(b"!")
        source.flush()
        os.copy_file_range(source.fileno(), f.fileno(), 100)


def from_a_pipe(path: Path) -> None:
    near, far = os.pipe()
    os.write(far, b"piped")
    with open(path, "r+b") as f:
        splice(near, f.fileno(), 5)
    os.close(near)
    os.close(far)


def without_a_name(path: Path) -> None:
    fd = os.open(path.parents[1], os.O_RDWR | os.O_TMPFILE)
    os.write(fd, b"tied")
    tie(fd, path.with_name("tied"))
    os.close(fd)


def by_proc(path: Path) -> None:
    fd = os.open(path, os.O_PATH)
    Path(f"/proc/self/fd/{fd}").write_text("again")
    os.close(fd)


def over(path: Path) -> None:
    (path.parents[1] / "b" / "x").replace(path)


QUIET: dict[str, Callable[[Path], object]] = {
    "written": overwrite,
    "written, and its time set back": set_back,
    "changed through a mapping, where no time tells": lambda path: change_in_place(path, b"!"),
    "truncated": lambda path: os.truncate(path, 7),
    "allocated": allocate,
    "sent to": send,
    "copied to": copy_range,
    "spliced to": from_a_pipe,
    "made without a name": without_a_name,
    "opened again by /proc": by_proc,
    "renamed": lambda path: path.rename(path.with_name("w")),
    "renamed over": over,
    "exchanged": lambda path: exchange(path, path.parents[1] / "b" / "z"),
    "given a mode": lambda path: path.chmod(0o600),
    "given none": lambda path: path.chmod(0),
    "its folder given a mode": lambda path: path.parent.chmod(0o700),
    "replaced by a link": lambda path: (path.unlink(), path.symlink_to("y")),
    "replaced by a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("trick", QUIET)
def test_a_watch_is_enough_for_a_file_that_was(settled: Path, memory: Memory, trick: str) -> None:
    before = memory.folders[""].digest
    QUIET[trick](settled / "a" / "x")
    after = look(memory)
    assert isinstance(after, Again)
    assert after.root != before


def test_attributes_of_files_and_folders_are_seen_to_change(settled: Path, memory: Memory) -> None:
    roots = {look(memory).root}
    for path in (settled / "a" / "x", settled / "b"):
        try:
            os.setxattr(path, "user.x", b"1")
        except OSError as error:
            pytest.skip(f"no extended attributes here: {error}")
        found = look(memory)
        assert isinstance(found, Again)
        roots.add(found.root)
    assert len(roots) == 3


def passing(path: Path) -> None:
    other = path.parents[1] / "b" / "passing"
    os.link(path, other)
    overwrite(other)
    other.unlink()


def overrun(path: Path) -> None:
    other = path.parents[1] / "b" / "passing"
    os.link(path, other)
    overwrite(other)
    (path.parents[1] / "b" / "y").replace(other)


def in_a_new_folder(path: Path) -> None:
    folder = path.parents[1] / "new"
    folder.mkdir()
    os.link(path, folder / "other")
    overwrite(folder / "other")
    (folder / "other").unlink()
    folder.rmdir()


def replaced(path: Path) -> None:
    path.parent.rename(path.parents[1] / "c")
    path.parent.mkdir()
    path.write_text("in another folder")


def moved_and_back(path: Path) -> None:
    folder, away = path.parent, path.parents[1] / "away"
    folder.rename(away)
    change_in_place(away / "x", b"!")
    away.rename(folder)


def reborn(path: Path) -> None:
    for each in path.parent.iterdir():
        each.unlink()
    path.parent.rmdir()
    path.parent.mkdir()


WHOLE: dict[str, Callable[[Path], object]] = {
    "a name that came and went": passing,
    "a name that was written over": overrun,
    "a name in a folder that nobody watched": in_a_new_folder,
    "another folder in its folder's place": replaced,
    "a folder that was away": moved_and_back,
    "a folder that was made anew": reborn,
    "exchanged folders": lambda path: exchange(path.parent, path.parents[1] / "b"),
    "a second name": lambda path: os.link(path, path.parents[1] / "0"),
    "a folder that denies its owner": lambda path: path.parent.chmod(0),
}


@pytest.mark.parametrize("trick", WHOLE)
def test_a_watch_is_not_enough_for(settled: Path, memory: Memory, trick: str) -> None:
    before = memory.folders[""].digest
    WHOLE[trick](settled / "a" / "x")
    after = look(memory)
    assert not isinstance(after, Again)
    assert after.root != before
    assert look(memory).root == after.root


def test_a_file_with_two_names_is_looked_at_though_one_is_touched(settled: Path, memory: Memory) -> None:
    os.link(settled / "b" / "x", settled / "a" / "w")
    look(memory)
    before = look(memory)
    change_in_place(settled / "b" / "x", b"!")
    after = look(memory)
    assert isinstance(before, Again)
    assert isinstance(after, Again)
    assert after.root != before.root


def test_what_stays_open_or_mapped_may_be_written_to_unseen(settled: Path, memory: Memory) -> None:
    """By a name that is gone: its events come from where nobody lives."""
    with open(settled / "a" / "x", "r+b", buffering=0) as f:
        inode = {os.fstat(f.fileno()).st_ino}
        os.link(settled / "a" / "x", settled / "b" / "other")
        (settled / "a" / "x").unlink()
        first = look(memory, inode)
        assert isinstance(look(memory, inode), Again)
        f.write(b"open")
    second = look(memory)
    assert isinstance(second, Again)
    assert second.root != first.root


def test_a_watch_is_not_asked_where_anything_may_be_open(settled: Path, memory: Memory) -> None:
    for number in range(2):  # then, and once more: it may have been written to since
        assert not isinstance(memory.look(set(), None if number == 0 else set(), False), Again)
    assert isinstance(look(memory), Again)


def test_events_beyond_the_queue_make_a_look_read_everything(settled: Path, memory: Memory) -> None:
    with open("/proc/sys/fs/inotify/max_queued_events") as f:
        most = int(f.read())
    change_in_place(settled / "b" / "y", b"!")
    one, two = settled / "a" / "x", settled / "a" / "y"
    for _ in range(most // 2 + 1):
        os.utime(one)
        os.utime(two)
    change_in_place(settled / "b" / "x", b"!")  # of which nothing tells
    assert not isinstance(look(memory), Again)
    assert isinstance(look(memory), Again)


@pytest.mark.parametrize("call", ["inotify_init1", "inotify_add_watch"])
def test_without_a_watch_everything_is_looked_at_and_after_a_while_one_is_tried_again(
    settled: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    memory.watch.stop()
    now = memory.watch.again_at
    monkeypatch.setattr(watching.time, "monotonic", lambda: now)
    with monkeypatch.context() as refused:
        refused.setattr(watching.LIBC, call, lambda *_: -1)
        for _ in range(2):
            assert not isinstance(look(memory), Again)
    assert not isinstance(look(memory), Again)
    assert memory.watch.fd == -1
    now += watching.AGAIN_S
    look(memory)
    assert isinstance(look(memory), Again)


def test_more_folders_than_a_watch_may_have_are_looked_at(
    settled: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MOST", 3)
    (settled / "c").mkdir()
    for _ in range(2):
        assert not isinstance(look(memory), Again)


def test_after_a_look_that_failed_nothing_is_trusted(
    settled: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_in_place(settled / "a" / "x", b"!")
    with monkeypatch.context() as broken:
        broken.setattr(Scan, "_name", lambda self, folder: {}[folder])
        with pytest.raises(KeyError):
            memory.look(set(), set(), False)
    assert not isinstance(look(memory), Again)


def test_verifying_finds_what_a_watch_did_not_tell(
    settled: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (settled / "b" / "y").write_text("told")
    (settled / "a" / "x").write_text("not told")
    monkeypatch.setattr(Watch, "touched", lambda self: {memory.folders["b/"].number: {"y"}})
    assert memory.look(set(), set(), True).stale == ["a/x"]


@pytest.fixture
def start() -> Iterator[Callable[[str], int]]:
    """Starts python code that says when it is ready; returns its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def _start(code: str) -> int:
        words = [sys.executable, "-c", code + "\nprint(flush=True); import time; time.sleep(1000)"]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield _start
    for process in started:
        process.kill()
        process.communicate()


def test_what_processes_have_open_and_mapped_is_known(root: Path, start: Callable[[str], int]) -> None:
    (root / "f").write_bytes(bytes(9))
    inode = (root / "f").stat().st_ino
    pid = start(f"f = open({str(root / 'f')!r}); import os; os.unlink({str(root / 'f')!r})")
    found = held({pid})
    assert found is not None
    assert {inode, os.stat(f"/proc/{pid}/exe").st_ino} <= found
    assert inode not in (mapped({pid}) or set())


def test_a_mapping_that_may_be_written_to_again_is_known(root: Path, start: Callable[[str], int]) -> None:
    (root / "f").write_bytes(bytes(9))
    pid = start(
        "import ctypes, mmap, os\n"
        f"f = os.open({str(root / 'f')!r}, os.O_RDWR); m = mmap.mmap(f, 9); m[0] = 1\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), 9, 1)"
    )
    assert (root / "f").stat().st_ino in (mapped({pid}) or set())


def test_of_whoever_has_a_socket_or_too_much_anything_may_be_open(
    start: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = start("import socket; s = socket.socketpair()")
    assert held({pid}) is None
    with closing(socket.socket()):
        assert held({os.getpid()}) is None
    plain = start("")
    assert held({plain}) is not None
    monkeypatch.setattr("sandbox.agent.processes.MOST_HELD", 3)
    assert held({plain}) is None


def test_a_process_outlives_its_first_thread(root: Path, start: Callable[[str], int]) -> None:
    """What it has open is known, and it can be stopped and killed."""
    (root / "f").write_bytes(bytes(9))
    code = f"import ctypes, sys, threading, time; f = open({str(root / 'f')!r}); "
    code += "threading.Thread(target=lambda: (time.sleep(0), print(flush=True), time.sleep(1000))).start(); "
    code += "ctypes.CDLL(None).pthread_exit(None)"
    pid = start(code)
    while (held({pid}) or set()).isdisjoint({(root / "f").stat().st_ino}):
        pass
    with open(f"/proc/{pid}/stat") as f:
        while f.read().rsplit(")", 1)[1].split()[0] != "Z":
            f.seek(0)
    assert processes()[pid][1] in "SR"
    assert (root / "f").stat().st_ino in (held({pid}) or set())
    assert kill(lambda: {pid} if processes().get(pid, (0, "Z"))[1] not in "ZX" else set()) == [pid]


TRICKS = """
import mmap, os
def change(path):
    with open(path, "r+b") as f, mmap.mmap(f.fileno(), 0) as m:
        m[0:1] = b"?" if m[0:1] != b"?" else b"!"
change("a/x")
os.link("a/y", "b/q"); f = open("b/q", "r+b", buffering=0); os.unlink("a/y")
os.rename("b/y", "b/w"); os.truncate("b/z", 3); os.mkdir("c"); os.rename("c", "d")
"""
LATER = """
import os, time
f = open("a/x", "r+b", buffering=0); os.link("a/x", "b/r"); os.unlink("a/x")
if os.fork():
    while not os.path.exists("ready"): time.sleep(0.001)
    os._exit(0)
open("ready", "w").close()
while not os.path.exists("go"): time.sleep(0.001)
f.write(b"later"); f.close()
open("done", "w").close(); os._exit(0)
"""
GO = """
import os, time
open("go", "w").close()
while not os.path.exists("done"): time.sleep(0.001)
"""


async def test_a_sandbox_is_looked_at_as_well_with_a_watch(make: Make, store: BlobStore) -> None:
    _, sandbox = await make()
    for path in ("a/x", "a/y", "b/y", "b/z"):
        await sandbox.put(path, path.encode() * 2000)
    seen = [await sandbox.snapshot(store)]
    for code in (TRICKS, LATER, GO, ""):
        result = await python(sandbox, code, keep_background=True)
        assert (result.code, result.background) == (0, int(code == LATER))
        seen.append(await sandbox.snapshot(store))
        verified = await sandbox.snapshot(store, verify=True)
        assert (str(verified), verified.stale) == (str(seen[-1]), ())
    assert len(set(seen)) == 4
    assert seen[3] == seen[4]
