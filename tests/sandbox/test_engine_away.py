"""A Docker engine that is killed, comes back, or hangs, while sandboxes are in use. The engine is one of our own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.own_docker import Dockerd, own_dockerd
from sandbox import BlobStore, CreateFailed, SandboxFailure, SandboxLost, SandboxSpec, cgroups, docker, host
from sandbox.docker import DockerDriver, Engine
from tests.sandbox.conftest import LIMITS, bash, is_gone

pytestmark = pytest.mark.docker
WAITS = ["bash", "-c", "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two"]


def spec(name: str) -> SandboxSpec:
    return SandboxSpec(name, "session", "tenant", 1, LIMITS)


async def opened(dockerd: Dockerd, home: Path, run_dir: Path) -> DockerDriver:
    return await DockerDriver.open(home, run_dir, Engine(environment={**os.environ, "DOCKER_HOST": dockerd.address}))


@pytest.fixture(scope="module")
def dockerd() -> Iterator[Dockerd]:
    with own_dockerd() as engine:
        if engine is None:
            pytest.skip("no Docker engine of our own can be started here")
        yield engine


async def test_a_call_goes_on_while_the_engine_is_dead_and_the_sandbox_can_be_used_and_released(
    dockerd: Dockerd, home: Path, tmp_path: Path
) -> None:
    driver = await opened(dockerd, home, tmp_path / "run")
    store = BlobStore(tmp_path / "blobs")
    handle, other = await driver.create(spec("goes-on")), await driver.create(spec("released"))
    sandbox = await driver.attach(handle)
    call = await sandbox.start("k", WAITS)
    dockerd.kill()
    try:
        await sandbox.close()
        sandbox = await driver.attach(handle, epoch=2)
        call = await sandbox.start("k", WAITS)
        await sandbox.put("go", b"")
        result = await call.result()
        assert (result.reason, result.code, result.output) == ("exit", 0, b"one\ntwo\n")
        assert await sandbox.snapshot(store)
        with pytest.raises(CreateFailed):
            await driver.create(spec("not-now"))
        await driver.release(other)
        assert is_gone(other.pid, other.start)
        assert "released" in " ".join((await driver.describe()).notes)
    finally:
        dockerd.start()
        assert dockerd.answers()
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"
    await sandbox.close()
    assert await driver.reap(["goes-on"]) == ["not-now", "released"]
    assert await driver.reap([]) == ["goes-on"]
    assert driver.engine.ask("ps", "--all", "--quiet") == ""


async def test_a_container_that_a_killed_engine_forgot_is_found_and_ended_with_its_groups(
    dockerd: Dockerd, home: Path, tmp_path: Path
) -> None:
    driver = await opened(dockerd, home, tmp_path / "run")
    handle = await driver.create(spec("forgotten"))
    container = str(handle.extra["container"])
    assert cgroups.of_container(container)
    dockerd.kill()
    dockerd.forget(container)
    dockerd.start()
    assert dockerd.answers()
    assert driver.engine.ask("ps", "--all", "--quiet") == ""
    assert not is_gone(handle.pid, handle.start)
    driver.records.remove("forgotten")
    host.return_uid(driver.home, "forgotten")
    assert await driver.found() == ["forgotten"]
    assert await driver.reap([]) == ["forgotten"]
    assert is_gone(handle.pid, handle.start)
    assert cgroups.of_container(container) == []
    assert await driver.found() == []


async def test_an_engine_that_hangs_ends_every_operation_by_its_deadline_and_is_cleaned_up_when_it_goes_on(
    dockerd: Dockerd, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await opened(dockerd, home, tmp_path / "run")
    handle = await driver.create(spec("held"))
    sandbox = await driver.attach(handle)
    call = await sandbox.start("k", ["sleep", "1000"])
    monkeypatch.setattr(docker, "CALL_S", 0.5)
    monkeypatch.setattr(docker, "START_S", 0.5)
    dockerd.hang()
    try:
        with pytest.raises(CreateFailed, match="did not answer"):
            await driver.create(spec("unborn"))
        with pytest.raises(SandboxFailure, match="did not answer"):
            await driver.found()
        with pytest.raises(SandboxFailure, match="did not answer"):
            await driver.reap([])
        assert await driver.reap([], ["held", "unborn"]) == []
        assert (await bash(sandbox, "echo alive")).output == b"alive\n"
        await driver.release(handle)
        assert (await call.result()).reason == "lost"
        notes = " ".join((await driver.describe()).notes)
        assert "held" in notes
        assert "unborn" in notes
        assert docker.why_not(driver.engine) is not None
    finally:
        dockerd.go_on()
    monkeypatch.undo()
    await sandbox.close()
    assert dockerd.answers()
    await _until_nothing_is_left(driver)
    assert "quarantined" not in " ".join((await driver.describe()).notes)


async def _until_nothing_is_left(driver: DockerDriver) -> None:
    """The engine still works off what it was told before it hung, so a container may come after its reaper."""
    for _ in range(100):
        await driver.reap([])
        if not await driver.found() and not driver.engine.ask("ps", "--all", "--quiet"):
            return
    raise AssertionError(await driver.found())


async def test_without_live_restore_a_call_is_lost_with_its_engine_and_a_new_sandbox_has_the_snapshot(
    home: Path, tmp_path: Path
) -> None:
    with own_dockerd(live_restore=False) as engine:
        if engine is None:
            pytest.skip("no Docker engine of our own can be started here")
        driver = await opened(engine, home, tmp_path / "run")
        store = BlobStore(tmp_path / "blobs")
        first = await driver.create(spec("first"))
        sandbox = await driver.attach(first)
        await sandbox.put("file", b"kept")
        root = await sandbox.snapshot(store)
        call = await sandbox.start("k", ["sleep", "1000"])
        engine.kill()
        engine.start()
        assert engine.answers()  # it ends what it finds running before it answers
        assert (await asyncio.wait_for(call.result(), 60)).reason == "lost"
        with pytest.raises(SandboxLost):
            await driver.attach(first)
        await sandbox.close()
        second = await driver.create(spec("second"))
        restored = await driver.attach(second)
        assert await restored.restore(root, store) == []
        assert await restored.get("file") == b"kept"
        await restored.close()
        assert await driver.reap([]) == ["first", "second"]


async def test_what_a_killed_engine_left_of_its_containerd_keeps_only_itself_from_starting(
    dockerd: Dockerd, home: Path, tmp_path: Path
) -> None:
    """A dockerd that runs its own containerd leaves `containerd.pid`; while that names a living process it will not
    start again. Until somebody removes the file, no engine answers: that must be said, and bar nothing else."""
    stale = Engine(environment={**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/nobody.sock"})
    reason = docker.why_not(stale)
    assert reason is not None
    assert "no Docker engine answers" in reason
    driver = await opened(dockerd, home, tmp_path / "run")
    handle = await driver.create(spec("outlives"))
    driver.engine = stale
    sandbox = await driver.attach(handle)
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"
    await sandbox.close()
    await driver.release(handle)
    assert is_gone(handle.pid, handle.start)
    driver.engine = Engine(environment={**os.environ, "DOCKER_HOST": dockerd.address})
    assert await driver.reap([]) == ["outlives"]
