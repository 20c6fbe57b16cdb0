from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import (
    BadSpec,
    CreateFailed,
    NoSandbox,
    SandboxFailure,
    SandboxSpec,
    bubblewrap,
    choose,
    choose_driver,
    docker,
    unstopped,
)
from sandbox.docker import DockerDriver, Engine
from tests.sandbox.conftest import bash, is_gone

ROOT = Path(__file__).parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_machine_with_nothing_gets_a_sentence_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    choice = choose()
    assert choice.backend is None
    assert "install bubblewrap" in choice.sentence()
    assert len(choice.reasons) == 2


async def test_no_driver_is_opened_where_none_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSandbox, match="install bubblewrap"):
        await choose_driver(tmp_path, tmp_path)


def test_docker_is_chosen_where_an_engine_answers_and_bubblewrap_where_none_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bubblewrap, "why_not", lambda: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, "docker", "echo 27.0.0")
    assert choose().backend == "docker"
    assert choose("bubblewrap").backend == "bubblewrap"
    program(tmp_path, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    choice = choose()
    assert choice.backend == "bubblewrap"
    assert "Cannot connect" in choice.sentence()
    assert choose("docker").backend is None


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(BadSpec, match="'podman'"):
        choose("podman")


def test_a_bubblewrap_that_may_not_make_namespaces_says_what_to_allow(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    folder = home / "programs"
    folder.mkdir()
    program(folder, "bwrap", "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    said = bubblewrap.why_not()
    assert said is not None
    assert "does not start" in said
    assert "allow user namespaces" in said


def test_the_probe_runs_with_the_system_s_python_and_nothing_installed() -> None:
    if not os.path.exists(SYSTEM_PYTHON):
        pytest.skip("this system has no Python of its own")
    answer = subprocess.run([SYSTEM_PYTHON, "-S", "-m", "sandbox.probe"], capture_output=True, text=True, cwd=ROOT)
    expected = choose().backend
    assert answer.returncode == (0 if expected else 1)
    assert expected is None or f"Tools will run in {expected}" in answer.stdout


def test_the_probe_fails_with_a_sentence_where_nothing_can_run(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "sandbox.probe"], capture_output=True, text=True, cwd=ROOT, env={"PATH": str(tmp_path)}
    )
    assert answer.returncode == 1
    assert "Install bubblewrap, or start Docker." in answer.stderr


def test_the_package_needs_nothing_but_the_standard_library() -> None:
    code = "import sys, sandbox; print(sorted({m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names))"
    answer = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert eval(answer.stdout) == ["__main__", "sandbox"] or eval(answer.stdout) == ["sandbox"]


def test_an_engine_that_hangs_is_given_up_at_its_deadline(tmp_path: Path) -> None:
    engine = Engine(str(program(tmp_path, "docker", "exec sleep 1000")))
    with pytest.raises(SandboxFailure, match="did not answer within"):
        engine.ask("ps", patience_s=0.2)


@pytest.mark.docker
async def test_a_container_whose_engine_hangs_is_killed_without_it_and_quarantined(
    home: Path, dockerd: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = docker.why_not()
    if reason is not None:
        pytest.skip(reason)
    driver = await DockerDriver.open(home, tmp_path / "run")
    handle = await driver.create(SandboxSpec("stuck", "session", "tenant", 1))
    sandbox = await driver.attach(handle)
    call = await sandbox.start("k", ["sleep", "1000"])
    working, driver.engine = driver.engine, Engine(str(program(tmp_path, "hung", "exec sleep 1000")))
    monkeypatch.setattr(docker, "CALL_S", 0.2)
    await driver.release(handle)
    assert (await call.result()).reason == "lost"
    assert is_gone(handle.pid, handle.start)
    assert "stuck" in " ".join((await driver.describe()).notes)
    await sandbox.close()
    driver.engine = working
    monkeypatch.setattr(docker, "CALL_S", 30.0)
    assert await driver.reap([]) == ["stuck"]
    assert "stuck" not in " ".join((await driver.describe()).notes)


@pytest.mark.sandbox
def test_an_ordinary_user_can_run_sandboxes_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    if os.getuid() != 0:
        pytest.skip("this whole suite runs as an ordinary user")
    if bubblewrap.why_not() is not None:
        pytest.skip("bubblewrap does not run here")
    import tempfile

    code = """
import asyncio, sys
from pathlib import Path
from sandbox import SandboxSpec
from sandbox.bubblewrap import BubblewrapDriver

async def main(base):
    driver = await BubblewrapDriver.open(base / "home", base / "run")
    handle = await driver.create(SandboxSpec("plain", "session", "tenant", 1))
    sandbox = await driver.attach(handle)
    print((await (await sandbox.start("k", ["bash", "-c", "echo ran"])).result()).output.decode(), end="")
    await sandbox.close()
    await driver.release(handle)
    print((await driver.describe()).limits_enforced["pids"], await driver.reap([]))

asyncio.run(main(Path(sys.argv[1])))
"""
    # The package needs nothing but the standard library, and root's own Python may lie where others cannot go.
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 4321, 4321)
        answer = subprocess.run(
            [python, "-c", code, folder], capture_output=True, text=True, cwd=ROOT, user=4321, group=4321,
            extra_groups=[], env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    if "Permission denied" in answer.stderr and answer.stdout == "":
        pytest.skip("another user cannot read this checkout")
    assert answer.stdout.startswith("ran\n"), answer.stderr
    assert answer.stdout.endswith("[]\n")


@pytest.mark.sandbox
async def test_the_chosen_driver_runs_a_call(home: Path, tmp_path: Path) -> None:
    if choose("bubblewrap").backend is None:
        pytest.skip("bubblewrap does not run here")
    driver = await choose_driver(home, tmp_path, prefer="bubblewrap")
    handle = await driver.create(SandboxSpec("chosen", "session", "tenant", 1))
    sandbox = await driver.attach(handle)
    assert (await bash(sandbox, "echo hello")).output == b"hello\n"
    await sandbox.close()
    await driver.release(handle)


@pytest.mark.sandbox
async def test_an_agent_that_cannot_start_leaves_nothing_and_says_why(home: Path, tmp_path: Path) -> None:
    if choose("bubblewrap").backend is None:
        pytest.skip("bubblewrap does not run here")
    driver = await bubblewrap.BubblewrapDriver.open(home, tmp_path)
    driver.image = type(driver.image)(driver.image.digest, driver.image.rootfs, "/usr/bin/no-python")
    with pytest.raises(CreateFailed, match="no-python"):
        await driver.create(SandboxSpec("mute", "session", "tenant", 1))
    assert await driver.reap([]) == []


@pytest.mark.sandbox
async def test_what_bubblewrap_cannot_stop_is_said_and_is_so(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choose("bubblewrap").backend is None:
        pytest.skip("bubblewrap does not run here")
    driver = await bubblewrap.BubblewrapDriver.open(home, tmp_path)
    driver.groups = None
    said = " ".join((await driver.describe()).notes)
    assert "cannot stop" in said
    assert all(each in said for each in unstopped.ALWAYS)
    assert "every processor" in said
    for pattern, told in (("core", False), ("|/usr/share/apport/apport %p", True)):
        (tmp_path / "core_pattern").write_text(pattern)
        monkeypatch.setattr(unstopped, "CORE_PATTERN", tmp_path / "core_pattern")
        assert ("/usr/share/apport/apport)" in " ".join((await driver.describe()).notes)) is told
    handle = await driver.create(SandboxSpec("curious", "session", "tenant", 1))
    sandbox = await driver.attach(handle)
    tells = (await bash(sandbox, "head -1 /proc/meminfo; cat /proc/version /proc/self/mountinfo")).output.decode()
    assert Path("/proc/meminfo").read_text().splitlines()[0] in tells
    assert Path("/proc/version").read_text() in tells
    assert driver.image.digest in tells
    await sandbox.close()
    await driver.release(handle)
