"""What several suites share: a real Postgres, started once, with a database made anew for each test that asks."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from runtime.embedded import PostgresServer, TemporalServer
from runtime.migrate import migrate
from runtime.settings import Settings
from runtime.store import Database

FIRST = ("stack", "upgrade", "workflows", "sandbox")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The stack's tests come first: they wait the most, and the others fill the time beside them. Then what takes long
    in one piece, so that no process is left alone with it at the end."""
    items.sort(key=lambda item: next((at for at, name in enumerate(FIRST) if name in item.path.parts), len(FIRST)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """For runs in several processes: what shares a stack stays together, of the rest each file."""
    return _ByFixtures(config, log)


class _ByFixtures(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "tests/stack" if file.startswith("tests/stack/") else file


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server for the whole run; it holds a database `template_migrated` with the schema."""
    base = Path(tempfile.mkdtemp(prefix="tenuto-test-", dir="/tmp"))
    base.chmod(0o711)  # the account that Postgres runs as must pass
    server = PostgresServer(Settings.load({}, {"TENUTO_HOME": str(base / "home")}))
    (base / "home").mkdir(mode=0o711)
    server.prepare()
    account = server.account
    with (base / "postgres.log").open("w") as log:
        process = subprocess.Popen(
            [*server.argv(), "-c", "fsync=off"],  # what these tests make need not outlive the machine
            env={**os.environ, **server.environment()},
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
            stdout=log,
            stderr=log,
        )
        try:
            asyncio.run(_make_template(server))
            yield server
        finally:
            process.send_signal(server.stop_signal)
            process.wait()
    shutil.rmtree(base)
    shutil.rmtree(server.socket_dir, ignore_errors=True)


async def _make_template(server: PostgresServer) -> None:
    await server.wait_ready()
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("CREATE DATABASE template_migrated")
    await connection.close()
    await migrate(dsn_of(server, "template_migrated"))


def dsn_of(server: PostgresServer, database: str) -> str:
    head, _, tail = server.dsn.partition("?")
    return f"{head.rsplit('/', 1)[0]}/{database}?{tail}"


@pytest.fixture
async def empty_dsn(postgres_server: PostgresServer) -> AsyncIterator[str]:
    """A database with nothing in it."""
    async for dsn in make_database(postgres_server, ""):
        yield dsn


@pytest.fixture
async def dsn(postgres_server: PostgresServer) -> AsyncIterator[str]:
    """A database with the schema and nothing else."""
    async for dsn in make_database(postgres_server, "TEMPLATE template_migrated"):
        yield dsn


@pytest.fixture
async def db(dsn: str) -> AsyncIterator[Database]:
    async with Database(dsn, patience_s=5.0) as database:
        yield database


async def make_database(server: PostgresServer, template: str) -> AsyncIterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    connection = await asyncpg.connect(server.dsn)
    await connection.execute(f"CREATE DATABASE {name} {template}")
    try:
        yield dsn_of(server, name)
    finally:
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await connection.close()


# how long an example takes depends on what else the machine does
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("tests")
MODELS_DIR = Settings.load().models_dir
TEST_MODEL = "smollm2-135m-instruct"


@pytest.fixture
def uncollected() -> Iterator[None]:
    """For tests that parse Python: CPython 3.11 cannot do so while a traceback is written, as it is where garbage is
    collected that holds an error which nobody asked for."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The small model of the catalogue; `make test` pulls it."""
    path = MODELS_DIR / f"{TEST_MODEL}.gguf"
    assert path.exists(), f"pull it first: tenuto model pull {TEST_MODEL}"
    return path


@pytest.fixture(scope="session")
def temporal_address() -> Iterator[str]:
    """A real Temporal server for the whole run."""
    home = tempfile.mkdtemp(prefix="tenuto-test-", dir="/tmp")
    server = TemporalServer(Settings.load({}, {"TENUTO_HOME": home}))
    server.prepare()
    process = subprocess.Popen(
        server.argv(),
        env={**os.environ, **server.environment()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        asyncio.run(server.wait_ready())
        yield server.address
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(home)
