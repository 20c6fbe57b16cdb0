"""The real Postgres and the real Temporal, killed the way machines kill."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pytest
from temporalio.client import Client, WorkflowExecutionStatus

import runtime.embedded.postgres as postgres_module
from runtime.embedded import PostgresServer, TemporalServer
from runtime.embedded.account import choose_account
from runtime.embedded.temporal import is_free
from runtime.errors import StartupError
from runtime.home import read_state
from runtime.settings import Settings
from tests.runtime.processes import UpProcess, until_gone, up_process

pytestmark = pytest.mark.stack
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account for Postgres")


@pytest.fixture
def home() -> Iterator[Path]:
    """Where the account of Postgres may pass, which the usual temporary directories of root do not allow."""
    base = Path(tempfile.mkdtemp(prefix="tenuto-test-", dir="/tmp"))
    base.chmod(0o711)
    yield base / "home"
    shutil.rmtree(base)


def settings_of(home: Path) -> Settings:
    return Settings.load(overrides={"TENUTO_HOME": str(home)})


@pytest.fixture
async def running(home: Path) -> AsyncIterator[UpProcess]:
    async with up_process(home, "embedded") as process:
        await process.events.wait("ready")
        yield process


async def rows(home: Path) -> list[int]:
    connection = await asyncpg.connect(read_state(home / "up.json")["dsn"])
    try:
        return [row["n"] for row in await connection.fetch("SELECT n FROM kept ORDER BY n")]
    finally:
        await connection.close()


async def keep(home: Path, *numbers: int) -> None:
    connection = await asyncpg.connect(read_state(home / "up.json")["dsn"])
    try:
        await connection.execute("CREATE TABLE IF NOT EXISTS kept (n int PRIMARY KEY)")
        await connection.executemany("INSERT INTO kept VALUES ($1)", [(number,) for number in numbers])
    finally:
        await connection.close()


async def temporal_client(home: Path) -> Client:
    return await Client.connect(read_state(home / "up.json")["temporal"])


async def is_running(home: Path, workflow_id: str) -> bool:
    description = await (await temporal_client(home)).get_workflow_handle(workflow_id).describe()
    return description.status is WorkflowExecutionStatus.RUNNING


async def test_rows_and_workflows_outlive_a_kill_of_both_servers(home: Path, running: UpProcess) -> None:
    before = read_state(home / "up.json")
    await keep(home, *range(100))
    await (await temporal_client(home)).start_workflow("Nothing", id="kept", task_queue="nobody")
    backends = [child.pid for child in psutil.Process(before["processes"]["postgres"]).children(recursive=True)]
    for name in ("postgres", "temporal"):
        os.kill(before["processes"][name], signal.SIGKILL)
    for name in ("postgres", "temporal"):
        await running.events.wait("started", name, count=2)
    after = read_state(home / "up.json")
    assert (after["dsn"], after["temporal"]) == (before["dsn"], before["temporal"])
    assert await rows(home) == list(range(100))
    assert await is_running(home, "kept")
    await until_gone(*backends)
    assert await running.signal(signal.SIGTERM) == 0


async def test_a_whole_stack_that_is_killed_leaves_no_process_and_no_lost_row(home: Path, running: UpProcess) -> None:
    state = read_state(home / "up.json")
    await keep(home, 1, 2, 3)
    await (await temporal_client(home)).start_workflow("Nothing", id="kept", task_queue="nobody")
    processes = [psutil.Process(pid) for pid in state["processes"].values()]
    all_pids = [one.pid for parent in processes for one in (parent, *parent.children(recursive=True))]
    assert len(all_pids) > 5
    await running.signal(signal.SIGKILL)
    await until_gone(*all_pids)
    async with up_process(home, "embedded") as again:
        await again.events.wait("ready")
        assert await rows(home) == [1, 2, 3]
        assert await is_running(home, "kept")
        assert read_state(home / "up.json")["temporal"] == state["temporal"]
        assert await again.signal(signal.SIGTERM) == 0
    settings = settings_of(home)
    for path in (settings.run_dir, settings.postgres_run_dir, settings.arena_dir, settings.state_path):
        assert not path.exists()


async def test_a_kill_and_at_once_another_start_never_has_two_postmasters(home: Path, running: UpProcess) -> None:
    await keep(home, 1)
    await running.signal(signal.SIGKILL)
    async with up_process(home, "embedded") as again:
        await again.events.wait("ready")
        assert await rows(home) == [1]
        await again.signal(signal.SIGTERM)


async def test_only_we_can_reach_the_database(home: Path, running: UpProcess) -> None:
    settings = settings_of(home)
    postmaster = psutil.Process(read_state(home / "up.json")["processes"]["postgres"])
    assert [one for one in postmaster.net_connections(kind="inet") if one.status == psutil.CONN_LISTEN] == []
    assert settings.postgres_run_dir.stat().st_mode & 0o777 == 0o700
    assert settings.run_dir.stat().st_mode & 0o777 == 0o700
    assert (settings.postgres_dir / "data").stat().st_mode & 0o777 == 0o700
    assert home.stat().st_mode & 0o066 == 0
    assert postmaster.uids().effective != 0
    connection = await asyncpg.connect(read_state(home / "up.json")["dsn"])
    try:
        shown = {name: await connection.fetchval(f"SHOW {name}") for name in ("fsync", "synchronous_commit")}
    finally:
        await connection.close()
    assert shown == {"fsync": "on", "synchronous_commit": "on"}
    await running.signal(signal.SIGTERM)


# --- parts ---------------------------------------------------------------------------------------------------------


def test_a_cluster_that_was_half_made_is_made_again(home: Path) -> None:
    server = PostgresServer(settings_of(home))
    half = home / "postgres" / "data.tmp"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    server.prepare()
    assert (server.data / "global").is_dir()
    assert not half.exists()
    shutil.rmtree(server.socket_dir)


def test_a_cluster_of_another_release_is_refused_in_a_sentence(home: Path) -> None:
    server = PostgresServer(settings_of(home))
    server.data.mkdir(parents=True)
    (server.data / "PG_VERSION").write_text("15\n")
    with pytest.raises(StartupError, match="made by Postgres 15, this is 18"):
        server.prepare()
    shutil.rmtree(server.socket_dir)


@as_root
def test_binaries_that_the_account_cannot_reach_are_copied(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = postgres_module._distribution()
    hidden = home.parent / "hidden"
    hidden.mkdir(mode=0o700)
    for name in (installed.name, f"{installed.name}.libs"):
        shutil.copytree(installed.with_name(name), hidden / name)
    monkeypatch.setattr(postgres_module, "_distribution", lambda: hidden / installed.name)
    server = PostgresServer(settings_of(home))
    server.prepare()
    assert Path(server.argv()[0]).is_relative_to(home)
    assert hidden.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(server.socket_dir)


@as_root
def test_a_home_that_the_account_cannot_reach_is_a_sentence_and_opens_nothing(home: Path) -> None:
    home.parent.chmod(0o700)
    with pytest.raises(StartupError, match="may not pass through the directories above"):
        PostgresServer(settings_of(home)).prepare()
    assert home.parent.stat().st_mode & 0o777 == 0o700


@as_root
def test_the_owner_of_the_data_stays_its_account(home: Path) -> None:
    nobody = 65534
    data = home / "data"
    data.mkdir(parents=True)
    os.chown(data, nobody, nobody)
    account = choose_account(data)
    assert account is not None
    assert account.uid == nobody


async def test_what_a_dead_postmaster_left_is_waited_for(home: Path) -> None:
    server = PostgresServer(settings_of(home))
    server.data.mkdir(parents=True)
    # A shell that starts its jobs in the background has them ignore SIGQUIT, and whoever they start too.
    heeding = ["env", "--default-signal=QUIT", "sleep", "600"]
    left = await asyncio.create_subprocess_exec(*heeding, cwd=server.data)
    assert server.lingering() == [left.pid]
    await asyncio.to_thread(server.settle, 4.0)
    assert await left.wait() == -signal.SIGQUIT
    assert server.lingering() == []
    shutil.rmtree(server.socket_dir)


def test_the_port_of_temporal_is_remembered_and_a_taken_one_is_left_alone(home: Path) -> None:
    import socket

    first = TemporalServer(settings_of(home))
    first.prepare()
    again = TemporalServer(settings_of(home))
    again.prepare()
    assert again.port == first.port
    with socket.create_server(("127.0.0.1", first.port)):
        assert not is_free("127.0.0.1", first.port)
        third = TemporalServer(settings_of(home))
        third.prepare()
        assert third.port != first.port


def test_the_environment_of_the_servers_is_their_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGDATABASE", "elsewhere")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "elsewhere:1")
    settings = settings_of(home)
    seen: dict[str, Any] = {**PostgresServer(settings).environment(), **TemporalServer(settings).environment()}
    assert not {"PGDATABASE", "TEMPORAL_ADDRESS"} & seen.keys()
