"""The drivers under test, each opened once, and a sandbox for every test that asks for one."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from _pytest.mark import ParameterSet

from sandbox import BlobStore, Driver, FakeDriver, Handle, Limits, Result, Sandbox, SandboxSpec, Volume
from sandbox import docker as docker_backend
from sandbox.bubblewrap import BubblewrapDriver, why_not
from sandbox.docker import DockerDriver
from tests.sandbox.outside import Proxy

LIMITS = Limits(memory_bytes=128 << 20, pids=64, workspace_bytes=32 << 20, tmp_bytes=8 << 20, call_timeout_s=30)
FAKE = pytest.param("fake", id="fake")
BUBBLEWRAP = pytest.param("bubblewrap", id="bubblewrap", marks=pytest.mark.sandbox)
BARE = pytest.param("bare", id="bubblewrap-without-cgroups", marks=pytest.mark.sandbox)
DOCKER = pytest.param("docker", id="docker", marks=pytest.mark.docker)
EVERY = [FAKE, BUBBLEWRAP, DOCKER]
ISOLATED = [BUBBLEWRAP, BARE, DOCKER]
AGENTS = ("test_shells", "test_talks")  # of what the agent does by itself, the same in every driver: one is enough
Make = Callable[..., Awaitable[tuple[Handle, Sandbox]]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that uses a driver runs over every driver; one marked `isolated` leaves out the fake, and runs also
    where no control group can be made, which changes what keeps the limits and nothing else."""
    if "backend" in metafunc.fixturenames:
        isolated = metafunc.definition.get_closest_marker("isolated") is not None
        backends = ISOLATED if isolated else EVERY
        if metafunc.module.__name__.rpartition(".")[2] in AGENTS:
            backends = [each if each is BUBBLEWRAP or each is FAKE else _soaked(each) for each in backends]
        metafunc.parametrize("backend", backends, scope="session")


def _soaked(backend: ParameterSet) -> ParameterSet:
    return pytest.param(*backend.values, id=backend.id, marks=[*backend.marks, pytest.mark.soak])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "isolated: says nothing about a driver that isolates nothing")


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """Where other users can read too: as root, sandboxes are other users."""
    with tempfile.TemporaryDirectory(prefix="tenuto-home-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def dockerd(request: pytest.FixtureRequest) -> Iterator[None]:
    """Uses the engine that answers. With SANDBOX_TEST_DOCKERD=1, root starts one of its own where none does."""
    if docker_backend.why_not() is None or os.environ.get("SANDBOX_TEST_DOCKERD") != "1" or not shutil.which("dockerd"):
        yield
        return
    base = Path(tempfile.mkdtemp(prefix="tenuto-dockerd-"))
    words = ["dockerd", "--data-root", str(base / "data"), "--exec-root", str(base / "exec"), "-p", str(base / "pid")]
    words += ["-H", f"unix://{base}/d.sock", "--iptables=false", "--bridge=none"]
    with open(base / "log", "wb") as log:
        daemon = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    os.environ["DOCKER_HOST"] = f"unix://{base}/d.sock"
    try:
        deadline = time.monotonic() + 60
        while docker_backend.why_not() is not None and daemon.poll() is None and time.monotonic() < deadline:
            select.select([], [], [], 0.1)
        yield
    finally:
        del os.environ["DOCKER_HOST"]
        daemon.terminate()
        daemon.wait(60)
        shutil.rmtree(base, ignore_errors=True)


@pytest_asyncio.fixture(loop_scope="function")
async def driver(
    backend: str, home: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Driver]:
    run_dir = tmp_path_factory.mktemp("run")
    made = await open_driver(backend, home, run_dir, request)
    yield made
    await made.reap([])


async def open_driver(backend: str, home: Path, run_dir: Path, request: pytest.FixtureRequest) -> Driver:
    if backend == "fake":
        return FakeDriver(run_dir)
    if backend == "docker":
        request.getfixturevalue("dockerd")
        reason = docker_backend.why_not()
        if reason is not None:
            pytest.skip(reason)
        return await DockerDriver.open(home, run_dir)
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    opened = await BubblewrapDriver.open(home, run_dir)
    if backend == "bare":
        opened.groups = None
    elif opened.groups is None:
        pytest.skip("this user may not make control groups")
    return opened


@pytest_asyncio.fixture
async def make(driver: Driver) -> AsyncIterator[Make]:
    """Makes a sandbox and attaches to it; closes and releases it when the test is over."""
    async with AsyncExitStack() as stack:

        async def _make(
            *, epoch: int = 1, limits: Limits = LIMITS, ttl_s: float = 900, volumes: tuple[Volume, ...] = ()
        ) -> tuple[Handle, Sandbox]:
            name = f"t-{uuid.uuid4().hex[:12]}"
            handle = await driver.create(
                SandboxSpec(name, "session", "tenant", epoch, limits, volumes, {"purpose": "test"}, ttl_s)
            )
            stack.push_async_callback(driver.release, handle)
            attached = await driver.attach(handle)
            stack.push_async_callback(attached.close)
            return handle, attached

        yield _make


@pytest_asyncio.fixture
async def sandbox(make: Make) -> Sandbox:
    return (await make())[1]


@pytest_asyncio.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Proxy]:
    driver = FakeDriver(tmp_path)
    async with AsyncExitStack() as stack:
        handle = await driver.create(SandboxSpec("s", "session", "tenant", 1))
        stack.push_async_callback(driver.release, handle)
        sandbox = await driver.attach(handle)
        stack.push_async_callback(sandbox.close)
        yield Proxy(sandbox, stack)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


async def run(sandbox: Sandbox, *argv: str, key: str | None = None, **options: object) -> Result:
    call = await sandbox.start(key or uuid.uuid4().hex, argv, **options)  # type: ignore[arg-type]
    return await call.result()


async def python(sandbox: Sandbox, code: str, **options: object) -> Result:
    return await run(sandbox, "python3", "-c", code, **options)


async def bash(sandbox: Sandbox, command: str, **options: object) -> Result:
    return await run(sandbox, "bash", "-c", command, **options)


def is_gone(pid: int, start: int, patience_s: float = 20) -> bool:
    """Waits on the process itself until it has ended."""
    from sandbox.host import start_time

    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if start_time(pid) != start:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(patience_s * 1000))
    finally:
        os.close(fd)
