"""Images by name: what a user's image brings, and what it cannot change."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox import BadSpec, CreateFailed, FakeDriver, SandboxSpec, docker, image
from sandbox.docker import DockerDriver, Engine
from sandbox.images import copy_clean
from tests.sandbox.conftest import LIMITS, run
from tests.sandbox.test_choose import program

Make = Callable[..., str]
HOSTILE = (
    "ENV LD_PRELOAD=/none.so LD_LIBRARY_PATH=/lib PYTHONPATH=/none PYTHONHOME=/none HOME=/root COLOUR=green",
    "ENV PATH=/opt/bin:/usr/bin:/bin",
    "USER root",
    'ENTRYPOINT ["/bin/sh", "-c", "exit 7"]',
    "VOLUME /data /work /usr/lib",
    "HEALTHCHECK CMD exit 1",
    "EXPOSE 80",
    "ONBUILD RUN exit 1",
    "LABEL tenuto.home=other tenuto.sandbox=other",
)


@pytest.fixture(scope="module")
def engine(dockerd: None) -> Engine:
    reason = docker.why_not()
    if reason is not None:
        pytest.skip(reason)
    return Engine()


@pytest.fixture
def make_image(engine: Engine, tmp_path: Path) -> Iterator[Make]:
    """Imports a tree of a shell and `cat`, with their libraries and no Python; removes the image afterwards."""
    names: list[str] = []
    made: list[str] = []

    def make(*changes: str, **files: str) -> str:
        names.append(f"tenuto-test/{uuid.uuid4().hex[:12]}:v1")
        with tarfile.open(tmp_path / "image.tar", "w") as tar:
            for inside, file in _a_shell().items():
                tar.add(os.path.realpath(file), arcname=inside.lstrip("/"))
            for inside, text in {"opt/marker": "theirs\n", **files}.items():
                member = tarfile.TarInfo(inside)
                member.size, member.mode = len(text), 0o4755
                tar.addfile(member, io.BytesIO(text.encode()))
        words = [word for change in changes for word in ("--change", change)]
        with open(tmp_path / "image.tar", "rb") as f:
            made.append(engine.ask("import", *words, "-", names[-1], stdin=f))
        return names[-1]

    yield make
    for name in [*names, *made]:  # a name may have come to mean another
        subprocess.run(["docker", "rmi", "--force", name], capture_output=True, check=False)


def _a_shell() -> dict[str, str]:
    files = {f"/bin/{name}": str(shutil.which(name, path="/usr/bin:/bin")) for name in ("sh", "cat", "env", "ls")}
    said = subprocess.run(["ldd", *files.values()], capture_output=True, text=True, check=True).stdout
    return files | {path: path for path in re.findall(r"(/\S+) \(0x", said)}


@pytest.fixture
async def driver(engine: Engine, home: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    made = await DockerDriver.open(home, tmp_path / "run")
    yield made
    await made.reap([])
    for tag in engine.ask(
        "images", "--filter", f"label=tenuto.made={made.home}", "--format", "{{.Repository}}:{{.Tag}}"
    ).split():
        engine.ask("rmi", tag)


def spec(name: str | None, sandbox_id: str = "box") -> SandboxSpec:
    return SandboxSpec(sandbox_id, "session", "tenant", 1, LIMITS, image=name)


@pytest.mark.docker
async def test_an_image_without_python_runs_our_agent_its_own_programs_and_nothing_of_its_configuration(
    driver: DockerDriver, make_image: Make, engine: Engine
) -> None:
    name = make_image(*HOSTILE, **{"etc/ld.so.preload": "/none.so\n", ".tenuto/usr/bin/planted": "x"})
    volumes = set(engine.ask("volume", "ls", "--quiet").split())
    handle = await driver.create(spec(name))
    sandbox = await driver.attach(handle)
    try:
        facts = engine.inspect(handle.extra["container"])
        assert facts is not None
        assert facts["Config"]["User"] not in ("", "0", "root")
        assert not facts["Config"].get("Volumes")
        assert not facts["Config"].get("OnBuild")
        assert "LD_PRELOAD" not in str(facts["Config"]["Env"])
        assert facts["HostConfig"]["ReadonlyRootfs"]
        assert facts["HostConfig"]["CapDrop"] == ["ALL"]
        assert "Health" not in facts["State"]
        assert set(engine.ask("volume", "ls", "--quiet").split()) == volumes
        said = (await run(sandbox, "sh", "-c", "cat /opt/marker 2>&1; echo $COLOUR $HOME $PATH $PYTHONPATH")).output
        words = [line for line in said.splitlines() if b"ld.so" not in line]  # LD_PRELOAD reaches tools, and fails
        assert words == [b"theirs", b"green /work /opt/bin:/usr/bin:/bin /none"]
        red = (await run(sandbox, "sh", "-c", "echo $COLOUR", env={"COLOUR": "red"})).output
        assert b"red" in red.splitlines()
        assert (await run(sandbox, "python3", "-c", "1")).code == 127
        for path in ("/opt/marker", "/.tenuto/usr/lib/tenuto/agent/server.py", "/usr/lib/new", "/data"):
            assert not (await run(sandbox, "sh", "-c", f"echo x >> {path}")).ok
        assert not (await run(sandbox, "ls", "/.tenuto/usr/bin/planted", "/etc/ld.so.preload")).ok
        assert b"rws" not in (await run(sandbox, "ls", "-l", "/opt/marker")).output
    finally:
        await sandbox.close()
        await driver.release(handle)


@pytest.mark.docker
async def test_an_image_is_made_once_used_again_and_removed_when_its_name_means_another(
    driver: DockerDriver, make_image: Make, engine: Engine
) -> None:
    name = make_image()
    first = driver.users.runnable(name)
    assert driver.users.runnable(name) == first
    assert driver.users.clean() == []
    engine.ask("tag", make_image("ENV NEW=1", **{"opt/new": "x"}), name)
    second = driver.users.runnable(name)
    assert second.tag != first.tag
    assert engine.ask("images", "--quiet", first.tag) == ""
    engine.ask("rmi", "--force", name)
    assert driver.users.clean() == [second.tag]
    assert list(driver.users.folder.glob("*.tar")) == []
    assert engine.ask("ps", "--all", "--quiet", "--filter", f"label=tenuto.tried={driver.home}") == ""


@pytest.mark.docker
async def test_the_escapes_that_an_image_could_open_are_shut_in_the_image_of_a_user_too(
    driver: DockerDriver, make_image: Make
) -> None:
    handle = await driver.create(spec(make_image(*HOSTILE)))
    sandbox = await driver.attach(handle)
    try:
        status = (await run(sandbox, "cat", "/proc/self/status")).output.decode()
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert all(int(facts[each], 16) == 0 for each in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
        assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
        assert not (await run(sandbox, "cat", "/proc/1/environ")).ok
    finally:
        await sandbox.close()
        await driver.release(handle)


@pytest.mark.docker
async def test_an_image_that_is_not_there_is_named_with_what_to_do(driver: DockerDriver) -> None:
    with pytest.raises(BadSpec, match=r"docker pull nobody/nothing:1.*TENUTO_SANDBOX_PULL=missing"):
        await driver.create(spec("nobody/nothing:1"))
    driver.users.pull = True
    with pytest.raises(CreateFailed, match="could not be pulled"):
        await driver.create(spec("localhost:1/nobody/nothing:1"))
    assert await driver.found() == []


async def test_an_image_for_another_machine_is_refused_with_both_names(tmp_path: Path, home: Path) -> None:
    answer = json.dumps([{"Id": "sha256:1", "Os": "linux", "Architecture": "s390x", "Config": {}}])
    path = program(tmp_path, "docker", f"case $1 in image) echo '{answer}';; esac")
    driver = DockerDriver.__new__(DockerDriver)
    from sandbox.images import UserImages

    driver.users = UserImages(Engine(str(path)), image.build(home / "sandbox" / "images"), "home", tmp_path, False)
    with pytest.raises(BadSpec, match="s390x"):
        driver.users.runnable("some/image")


@pytest.mark.parametrize(
    "name",
    ["--privileged", "-v/:/host", "a b", "A/b", "", "a" * 256, "a:b:c", "a//b", "../a", "a@sha256:12", "a\n", "a;b",
     "$(id)", "a:-b", "a:" + "b" * 129, "registry:99999999/a", "é"],
)  # fmt: skip
def test_a_name_that_is_none_never_reaches_the_engine(name: str) -> None:
    with pytest.raises(BadSpec, match="no name of an image"):
        spec(name)


@pytest.mark.parametrize(
    "name", ["busybox", "python:3.12-slim", "gcr.io/distroless/static:nonroot", "localhost:5000/a/b_c__d-e.f:T.1",
             "a@sha256:" + "0" * 64],
)  # fmt: skip
def test_usual_names_are_taken(name: str) -> None:
    assert spec(name).image == name


async def test_a_backend_without_images_says_which_one_has_them(tmp_path: Path) -> None:
    with pytest.raises(BadSpec, match="need Docker, and this is fake"):
        await FakeDriver(tmp_path).create(spec("busybox"))


def test_what_would_get_in_the_way_is_left_out_of_an_image(tmp_path: Path) -> None:
    source, target = tmp_path / "a.tar", tmp_path / "b.tar"
    with tarfile.open(source, "w") as tar:
        for name, kind, mode in (("run", tarfile.SYMTYPE, 0o777), ("bin/su", tarfile.REGTYPE, 0o4755),
                                 ("dev/sda", tarfile.BLKTYPE, 0o666), ("./.tenuto/x", tarfile.REGTYPE, 0o644),
                                 ("x", tarfile.LNKTYPE, 0o644)):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.linkname = kind, mode, "./.tenuto/x" if name == "x" else "/etc"
            tar.addfile(member)
    with tarfile.open(source) as read, tarfile.open(target, "w") as written:
        copy_clean(read, written)
    with tarfile.open(target) as tar:
        kept = {member.name: member for member in tar}
    assert kept["run"].isdir()
    assert kept["bin/su"].mode == 0o755
    assert not {"dev/sda", "x", ".tenuto/x", "./.tenuto/x"} & set(kept)
