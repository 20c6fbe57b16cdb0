"""The agent's own parts, without a process around them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sandbox.agent.calls import Call
from sandbox.agent.errors import Refused
from sandbox.agent.server import TICK_S, Agent
from sandbox.agent.workspace import Workspace

ROOT = Path(__file__).parents[2]


def call(cap: int) -> Call:
    return Call("k", "digest", {"argv": ["x"], "output_bytes": cap, "timeout_s": 60}, b"")


def test_an_unchanged_file_is_not_read_again_and_a_changed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(str(tmp_path))
    (tmp_path / "a").write_bytes(b"same")
    (tmp_path / "b").write_bytes(b"old")
    reads: list[str] = []
    original = Workspace._hash

    def counted(fd: int, name: str, mode: int) -> str:
        reads.append(name)
        return original(fd, name, mode)

    monkeypatch.setattr(Workspace, "_hash", staticmethod(counted))
    now = time.time_ns() + 1_000_000_000
    monkeypatch.setattr("sandbox.agent.workspace.time.time_ns", lambda: now)
    first = workspace.scan(set())
    (tmp_path / "b").write_bytes(b"new")
    second = workspace.scan(set())
    assert reads == ["a", "b", "b"]
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_a_file_changed_within_one_tick_of_its_scan_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(str(tmp_path))
    path = tmp_path / "a"
    path.write_bytes(b"one")
    before = path.stat()
    monkeypatch.setattr("sandbox.agent.workspace.time.time_ns", lambda: before.st_ctime_ns)
    first = workspace.scan(set())
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert workspace.scan(set()) != first


def test_a_mapped_file_is_never_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(str(tmp_path))
    (tmp_path / "a").write_bytes(b"x")
    now = time.time_ns() + 1_000_000_000
    monkeypatch.setattr("sandbox.agent.workspace.time.time_ns", lambda: now)
    workspace.scan({(tmp_path / "a").stat().st_ino})
    assert workspace.cache == {}
    workspace.scan(set())
    assert len(workspace.cache) == 1


def test_a_workspace_nested_without_end_is_refused_and_can_still_be_emptied(tmp_path: Path) -> None:
    workspace = Workspace(str(tmp_path))
    names = "/".join(["d"] * 205)
    os.makedirs(tmp_path / names)
    with pytest.raises(Refused, match="nested deeper"):
        workspace.scan(set())
    workspace.apply(["rm", "d"], memoryview(b""))
    assert workspace.scan(set()) == []


@pytest.mark.parametrize("cap", [1, 7, 100, 40_000])
@pytest.mark.parametrize("total", [0, 1, 99, 100, 101, 50_000])
def test_captured_output_never_exceeds_its_cap_and_accounts_for_every_byte(cap: int, total: int) -> None:
    made = call(cap)
    data = os.urandom(total)
    for at in range(0, total, 997):
        made.capture("out" if at % 2 else "err", data[at : at + 997])
    made.close_output()
    made.end("exit", 0)
    kept = b"".join(piece for stream, piece in made.chunks if stream != "note")
    assert len(kept) == min(cap, total)
    assert made.result is not None
    assert made.result["stdout_bytes"] + made.result["stderr_bytes"] == total
    assert made.result["truncated"] == (total > cap)
    assert any(data.startswith(kept[:cut]) and data.endswith(kept[cut:]) for cut in {len(kept), made.captured})


@pytest.mark.parametrize("offset", [0, 1, 5, 6, 9, 10])
def test_output_is_followed_from_any_byte(offset: int) -> None:
    made = call(100)
    for piece in (b"hello", b"world"):
        made.capture("out", piece)
    assert b"".join(data for _, data in made.after(offset)) == b"helloworld"[offset:]


def test_an_ended_call_with_a_background_process_does_not_make_the_agent_spin() -> None:
    ended = call(100)
    ended.deadline = time.monotonic() - 10
    ended.end("exit", 0)
    agent = SimpleNamespace(shepherds={1: ended})
    assert Agent.patience(agent) == TICK_S  # type: ignore[arg-type]
    running = call(100)
    running.deadline = time.monotonic() - 10
    agent.shepherds[2] = running
    assert Agent.patience(agent) == 0  # type: ignore[arg-type]


def test_the_agent_imports_nothing_but_the_standard_library_and_itself() -> None:
    code = "import sys; sys.path.insert(0, 'sandbox'); import agent.main; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-I", "-S", "-c", code.replace("'sandbox'", repr(str(ROOT / "sandbox")))],
                            capture_output=True, text=True, check=True)  # fmt: skip
    foreign = {name.split(".")[0] for name in answer.stdout.split()} - set(sys.stdlib_module_names) - {"__main__"}
    assert foreign == {"agent"}
