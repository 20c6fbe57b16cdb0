"""`up` with stand-ins for its children: what it promises about its home, its state file and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from runtime.errors import StartupError
from runtime.home import private_dir, read_state
from runtime.settings import Settings
from runtime.up import Stack, api, engine, up
from tests.runtime.processes import Events, stand_in, until_gone, up_process


def settings_of(home: Path) -> Settings:
    return Settings.load(overrides={"TENUTO_HOME": str(home)})


def left_on(home: Path) -> list[Path]:
    """What only a running stack has."""
    settings = settings_of(home)
    made = (settings.run_dir, settings.postgres_run_dir, settings.arena_dir, settings.state_path)
    return [path for path in made if path.exists()]


async def test_a_stack_comes_up_shows_itself_and_leaves_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with up_process(home, "small") as running:
        await running.events.wait("ready")
        state = read_state(home / "up.json")
        assert state["ready"] is True
        assert state["pid"] == running.process.pid
        assert list(state["processes"]) == ["one", "two"]
        assert (home / "up.json").stat().st_mode & 0o077 == 0
        assert home.stat().st_mode & 0o077 == 0
        assert settings_of(home).run_dir.stat().st_mode & 0o077 == 0
        assert await running.signal(signal.SIGTERM) == 0
    await until_gone(*state["processes"].values())
    assert left_on(home) == []


async def test_the_state_file_follows_a_child_that_died(tmp_path: Path) -> None:
    async with up_process(tmp_path, "small") as running:
        await running.events.wait("ready")
        os.kill(read_state(tmp_path / "up.json")["processes"]["one"], signal.SIGKILL)
        again = await running.events.wait("started", "one", count=2)
        assert read_state(tmp_path / "up.json")["processes"]["one"] == again["pid"]
        assert await running.signal(signal.SIGINT) == 0


async def test_a_second_up_on_the_same_home_is_refused_in_a_sentence(tmp_path: Path) -> None:
    async with up_process(tmp_path, "small") as first:
        await first.events.wait("ready")
        async with up_process(tmp_path, "small") as second:
            assert await second.end() == 1
            assert f"already up on {tmp_path}: process {first.process.pid}" in second.refusal
        assert read_state(tmp_path / "up.json")["pid"] == first.process.pid


async def test_an_up_that_is_killed_leaves_no_process_and_the_next_one_starts(tmp_path: Path) -> None:
    async with up_process(tmp_path, "small") as first:
        await first.events.wait("ready")
        state = read_state(tmp_path / "up.json")
        await first.signal(signal.SIGKILL)
    await until_gone(*state["processes"].values())
    async with up_process(tmp_path, "small") as second:
        await second.events.wait("ready")
        assert await second.signal(signal.SIGTERM) == 0
    assert left_on(tmp_path) == []


async def test_a_component_that_fails_takes_the_rest_down_with_its_sentence(tmp_path: Path) -> None:
    async def broken(stack: Stack) -> None:
        raise StartupError("the model is not here")

    events = Events()
    with pytest.raises(StartupError, match="the model is not here"):
        await up(settings_of(tmp_path), events, components=(stand_in("one"), broken))
    await until_gone(*(event["pid"] for event in events.of("started")))
    assert left_on(tmp_path) == []


async def test_the_admin_key_is_made_once_and_private(tmp_path: Path) -> None:
    keys = set()
    for _ in range(2):
        async with up_process(tmp_path, "small") as running:
            await running.events.wait("ready")
            keys.add(settings_of(tmp_path).admin_key)
            assert (tmp_path / "admin.key").stat().st_mode & 0o777 == 0o600
            await running.signal(signal.SIGTERM)
    (key,) = keys
    assert re.fullmatch(r"tk_[A-Za-z0-9_-]{32}", key)


async def test_children_get_the_resolved_settings_and_nothing_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENUTO_SANDBOX", "docker")
    overrides = {"TENUTO_HOME": str(tmp_path / "home"), "TENUTO_SANDBOX": "auto"}
    stack = Stack(Settings.load(overrides=overrides), Events())
    (tmp_path / "home").mkdir()
    stack.resolve(postgres_dsn="postgresql://u@/d", api_port=1234)
    assert Settings.load(stack.environment()) == stack.settings
    assert json.loads((tmp_path / "home" / "up.json").read_text())["dsn"] == "postgresql://u@/d"


async def test_a_taken_port_is_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        settings = Settings.load(overrides={"TENUTO_HOME": str(tmp_path), "TENUTO_API_PORT": str(port)})
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is taken"):
            await api(Stack(settings, Events()))


async def test_an_engine_that_was_given_is_not_started(tmp_path: Path) -> None:
    settings = Settings.load(overrides={"TENUTO_HOME": str(tmp_path), "TENUTO_ENGINE_ADDRESS": "gpu-1:9000"})
    stack = Stack(settings, Events())
    await engine(stack)
    assert stack.supervisor.pids == {}


def test_a_run_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(StartupError, match="belongs to somebody else"):
        private_dir(tmp_path / "link")


async def test_a_home_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"TENUTO_HOME is .*cannot be used"):
        await up(settings_of(tmp_path / "file" / "home"), Events(), components=())
