"""Birth, loss, adoption and death of sandboxes, over every driver."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import (
    BadSpec,
    CreateFailed,
    Driver,
    Handle,
    Limits,
    SandboxLost,
    SandboxSpec,
    Volume,
)
from sandbox import host as host_module
from sandbox.link import Link, unix_connect
from tests.sandbox.conftest import LIMITS, Make, bash, is_gone

OWNER = """
import asyncio, json, sys
from pathlib import Path
from sandbox import FakeDriver, SandboxSpec
from sandbox.bubblewrap import BubblewrapDriver
from sandbox.docker import DockerDriver

async def main(kind, home, run_dir):
    home, run_dir = Path(home), Path(run_dir)
    if kind == "fake":
        driver = FakeDriver(run_dir)
    else:
        driver = await (DockerDriver if kind == "docker" else BubblewrapDriver).open(home, run_dir)
        if kind == "bare":
            driver.groups = None
    handle = await driver.create(SandboxSpec("adopted", "session", "tenant", 1))
    sandbox = await driver.attach(handle)
    call = await sandbox.start("k", ["bash", "-c", "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two"])
    async for chunk in call:
        break
    print(json.dumps(handle.to_json()), flush=True)
    await asyncio.sleep(1000)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_call_survives_the_kill_of_its_owner_and_another_process_gets_its_result(
    driver: Driver, backend: str, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = driver.records.root.parent  # type: ignore[attr-defined]
    root = Path(__file__).parents[2]
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, backend, str(home), str(run_dir), stdout=subprocess.PIPE, cwd=root
    )
    assert owner.stdout is not None
    handle = Handle.from_json((await owner.stdout.readline()).decode())
    owner.kill()
    assert await owner.wait() == -signal.SIGKILL
    sandbox = await driver.attach(handle, epoch=2)
    argv = ["bash", "-c", "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two"]
    call = await sandbox.start("k", argv)
    await sandbox.put("go", b"")
    result = await call.result()
    assert (result.reason, result.code, result.output) == ("exit", 0, b"one\ntwo\n")
    await sandbox.close()
    await driver.release(handle)
    assert is_gone(handle.pid, handle.start)


async def test_a_handle_survives_json_and_does_not_print_its_token(make: Make) -> None:
    handle, _ = await make()
    text = json.dumps(handle.to_json())
    assert Handle.from_json(text) == handle
    assert handle.token not in repr(handle)
    with pytest.raises(BadSpec):
        Handle.from_json("{}")


async def test_release_leaves_no_process_no_file_and_no_record_and_may_be_repeated(driver: Driver) -> None:
    handle = await driver.create(SandboxSpec("gone", "session", "tenant", 1, LIMITS))
    sandbox = await driver.attach(handle)
    await bash(sandbox, "setsid sleep 1000 >/dev/null 2>&1 & touch file", keep_background=True)
    tree = _tree(handle.pid)
    assert len(tree) >= 2
    await sandbox.close()
    for _ in range(3):
        await driver.release(handle)
    assert all(is_gone(pid, start) for pid, start in tree.items())
    assert list(driver.records.root.iterdir()) == []  # type: ignore[attr-defined]
    assert "gone" not in host_module.uid_owners(driver.home)  # type: ignore[attr-defined]
    assert [found for found, *_ in host_module.agents(driver.home)] == []  # type: ignore[attr-defined]
    groups = getattr(driver, "groups", None)
    assert groups is None or groups.names(f"{driver.home}-") == []  # type: ignore[attr-defined]
    with pytest.raises(SandboxLost):
        await driver.attach(handle)


async def test_the_reaper_removes_what_is_not_live_and_keeps_what_is(driver: Driver) -> None:
    kept = await driver.create(SandboxSpec("kept", "session", "tenant", 1, LIMITS))
    lost = await driver.create(SandboxSpec("lost", "session", "tenant", 1, LIMITS))
    assert await driver.reap(["kept"]) == ["lost"]
    assert is_gone(lost.pid, lost.start)
    sandbox = await driver.attach(kept)
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"
    await sandbox.close()
    assert await driver.reap([]) == ["kept"]
    assert await driver.reap([]) == []


async def test_a_sandbox_that_is_created_while_the_reaper_asks_what_is_live_is_left_alone(driver: Driver) -> None:
    await driver.create(SandboxSpec("lost", "session", "tenant", 1, LIMITS))
    found = await driver.found()
    young = await driver.create(SandboxSpec("young", "session", "tenant", 1, LIMITS))
    assert await driver.reap([], found) == ["lost"]
    assert host_module.start_time(young.pid) == young.start
    assert await driver.found() == ["young"]


async def test_the_reaper_finds_a_sandbox_whose_record_is_lost(driver: Driver) -> None:
    handle = await driver.create(SandboxSpec("unwritten", "session", "tenant", 1, LIMITS))
    driver.records.remove("unwritten")  # type: ignore[attr-defined]
    assert await driver.reap([]) == ["unwritten"]
    assert is_gone(handle.pid, handle.start)


async def test_the_reaper_leaves_the_sandboxes_of_another_home_alone(
    driver: Driver, backend: str, home: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from tests.sandbox.conftest import open_driver

    other = await open_driver(backend, home, tmp_path, request)
    handle = await driver.create(SandboxSpec("mine", "session", "tenant", 1, LIMITS))
    assert await other.reap([]) == []
    await (await driver.attach(handle)).close()


async def test_an_agent_without_a_controller_ends_itself_and_its_tools(make: Make) -> None:
    handle, sandbox = await make(ttl_s=0.2)
    await bash(sandbox, "sleep 1000 & disown", keep_background=True)
    tree = _tree(handle.pid)
    await sandbox.close()
    assert all(is_gone(pid, start) for pid, start in tree.items())


async def test_attaching_to_a_sandbox_that_died_says_that_it_is_lost(driver: Driver, make: Make) -> None:
    handle, _ = await make()
    for pid in _tree(handle.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert is_gone(handle.pid, handle.start)
    with pytest.raises(SandboxLost, match="is gone"):
        await driver.attach(handle)


async def test_limits_beyond_what_the_machine_has_are_refused_and_leave_nothing(driver: Driver) -> None:
    limits = Limits(memory_bytes=1 << 45)
    with pytest.raises(BadSpec, match="this machine has"):
        await driver.create(SandboxSpec("huge", "session", "tenant", 1, limits))
    assert await driver.found() == []


async def test_a_second_sandbox_of_the_same_id_is_refused_and_the_first_lives(driver: Driver) -> None:
    spec = SandboxSpec("twice", "session", "tenant", 1, LIMITS)
    handle = await driver.create(spec)
    with pytest.raises(CreateFailed, match="exists"):
        await driver.create(spec)
    await (await driver.attach(handle)).close()


@pytest.mark.isolated
async def test_a_sandbox_that_cannot_be_made_leaves_nothing(driver: Driver, tmp_path: Path) -> None:
    volume = Volume(tmp_path / "not-there", "/mnt/x")
    with pytest.raises(CreateFailed, match="not-there"):
        await driver.create(SandboxSpec("stillborn", "session", "tenant", 1, LIMITS, (volume,)))
    assert list(driver.records.root.iterdir()) == []  # type: ignore[attr-defined]
    assert await driver.reap([]) == []


async def test_nothing_of_its_maker_is_inherited(driver: Driver) -> None:
    reader, writer = os.pipe()
    listener = socket.create_server(("127.0.0.1", 0))
    for fd in (reader, writer, listener.fileno()):
        os.set_inheritable(fd, True)
    held = {os.stat(fd).st_ino for fd in (reader, writer, listener.fileno())}
    handle = await driver.create(SandboxSpec("clean", "session", "tenant", 1, LIMITS))
    try:
        seen = set()
        for pid in _tree(handle.pid):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    seen.add(fd.stat().st_ino)
        assert seen
        assert not held & seen
    finally:
        os.close(reader)
        os.close(writer)
        listener.close()


async def test_a_wrong_token_opens_nothing(make: Make) -> None:
    handle, _ = await make()
    with pytest.raises(SandboxLost):
        await Link.open(Path(handle.socket), "0" * 64)


@pytest.mark.parametrize(
    "frame",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">II", 1 << 31, 0), struct.pack(">II", 2, 0) + b"[]", b"\0" * 8],
    ids=["http", "huge", "not-an-object", "empty"],
)
async def test_garbage_on_the_socket_ends_that_connection_and_nothing_else(make: Make, frame: bytes) -> None:
    handle, sandbox = await make()
    sock = unix_connect(Path(handle.socket))
    assert sock is not None
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    writer.write(frame)
    try:
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 20)  # the agent's greeting, then its end of the connection
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"


async def test_the_description_names_every_limit(driver: Driver) -> None:
    described = await driver.describe()
    assert described.backend == driver.name
    assert set(described.limits_enforced) == set(Limits.__dataclass_fields__)
    if driver.name == "bubblewrap":
        assert "weaker isolation" in described.isolation


def _tree(pid: int) -> dict[int, int]:
    """A process and its descendants, with their start times."""
    return {each: host_module.start_time(each) for each in {pid} | host_module.descendants({pid})}
