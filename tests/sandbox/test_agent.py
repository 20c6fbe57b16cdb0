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
from sandbox.agent.server import TICK_S, Agent
from sandbox.agent.workspace import Workspace

ROOT = Path(__file__).parents[2]


def call(cap: int) -> Call:
    return Call("k", "digest", {"argv": ["x"], "output_bytes": cap, "timeout_s": 60}, b"")


def test_a_workspace_nested_without_end_can_be_emptied(tmp_path: Path) -> None:
    workspace = Workspace(str(tmp_path))
    names = "/".join(["d"] * 205)
    os.makedirs(tmp_path / names)
    fd = workspace.open_root(os.O_PATH)
    workspace.apply(fd, "d", ["rm", "d"], memoryview(b""))
    os.close(fd)
    assert list(tmp_path.iterdir()) == []


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
    agent = SimpleNamespace(shepherds={1: ended}, paused_at=None)
    agent.on_the_clock = lambda: Agent.on_the_clock(agent)  # type: ignore[arg-type]
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


FULL = """
import asyncio, resource, sys
from pathlib import Path
from sandbox import FakeDriver, SandboxBusy, SandboxSpec

async def main():
    driver = FakeDriver(Path(sys.argv[1]))
    handle = await driver.create(SandboxSpec("full", "session", "tenant", 1))
    sandbox = await driver.attach(handle)
    try:
        for i in range(40):
            call = await sandbox.start(f"k{i}", ["bash", "-c", "sleep 1000 &"], keep_background=True)
            assert (await call.result()).reason == "exit"
    except SandboxBusy:
        print("busy", await sandbox.busy() > 0)
    await sandbox.killall()
    while await sandbox.busy():
        await asyncio.sleep(0.01)
    print((await (await sandbox.start("last", ["echo", "again"])).result()).output)
    await sandbox.close()
    await driver.release(handle)

resource.setrlimit(resource.RLIMIT_NOFILE, (440, 440))
asyncio.run(main())
"""


def test_calls_that_take_every_descriptor_stop_further_calls_and_not_the_agent(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("busy True\nb'again\\n'\n", "")
