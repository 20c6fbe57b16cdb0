"""Every known way out, tried over every driver that isolates, and where nothing isolates to see that it is one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import Driver, Volume, image
from tests.sandbox.conftest import Make, bash
from tests.sandbox.escapes import Escape, attempt, every_escape, told
from tests.sandbox.witness import Witness, witness

# A copy of the image's tree that may be written; nothing mounted here is seen outside. The shell is process 1.
NAMESPACES = """
set -e
mount -t tmpfs none "$1" && mkdir "$1/up" "$1/work" "$1/root"
mount -t overlay none -o "lowerdir=$2,upperdir=$1/up,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc none proc && mount --rbind /sys sys && mount --rbind /dev dev
mount -t tmpfs none dev/shm && mount -t tmpfs none tmp && mount -t tmpfs none run
mkdir old && pivot_root . old
shift 2
"$@"
true
"""


@pytest.fixture
def outside(home: Path) -> Iterator[Witness]:
    """In a folder that any user may enter: what keeps a tool out must be the sandbox."""
    folder = home / f"witness-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    with witness(folder) as made:
        yield made


def test_there_are_enough_attempts_each_has_a_name_of_its_own_and_a_control_or_a_reason() -> None:
    names = [escape.name for escape in every_escape()]
    assert len(set(names)) == len(names) >= 100
    assert [escape.name for escape in every_escape() if bool(escape.control) == bool(escape.uncontrolled)] == []


@pytest.mark.isolated
async def test_nothing_gets_out(make: Make, outside: Witness, home: Path) -> None:
    for name in ("esc-open", "esc-shut"):
        (home / name).mkdir(exist_ok=True)
        (home / name).chmod(0o777)
    volumes = (Volume(home / "esc-shut", "/mnt/shut"), Volume(home / "esc-open", "/mnt/open", read_only=False))
    _, neighbour = await make()
    await bash(neighbour, f"for d in /work /tmp /dev/shm; do echo {outside.neighbour} > $d/neighbour; done")
    await neighbour.start("still", ["sleep", "1000"], env={"SECRET": outside.neighbour})
    _, sandbox = await make(volumes=volumes)
    outcomes = [await attempt(sandbox, escape, outside) for escape in every_escape()]
    assert {outcome.name: outcome.got for outcome in outcomes if not outcome.held} == {}
    assert (await bash(sandbox, "echo alive")).output == b"alive\n"


def test_as_root_of_this_machine_the_same_words_reach_what_they_aim_at(outside: Witness, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can show that it is not root's right that is missing")
    (tmp_path / "work").mkdir()
    failed = {}
    for escape in every_escape():
        if escape.control == "host":
            argv = escape.argv(outside)
            answer = subprocess.run([sys.executable, *argv[1:]], capture_output=True, cwd=tmp_path, timeout=60)
            outcome = told(escape, answer.stdout, outside)
            if outcome.held or "broken" in outcome.got:
                failed[escape.name] = outcome
    assert failed == {}


def test_as_root_in_namespaces_of_its_own_with_no_filter_the_same_words_succeed(
    home: Path, tmp_path: Path, outside: Witness
) -> None:
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can make such namespaces, by util-linux's unshare")
    built = image.build(home / "sandbox" / "images")
    failed = {}
    for escape in every_escape():
        if escape.control == "root":
            words = [
                "unshare",
                "--mount",
                "--uts",
                "--ipc",
                "--net",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                NAMESPACES,
                "sh",
            ]
            words += [str(tmp_path), str(built.rootfs), built.python, *escape.argv(outside)[1:]]
            answer = subprocess.run(words, capture_output=True, timeout=60, env={**os.environ, "SECRET": "x"})
            outcome = told(escape, answer.stdout, outside)
            if outcome.held or "broken" in outcome.got:
                failed[escape.name] = (outcome, answer.stderr[-300:])
    assert failed == {}


async def test_an_attempt_that_gets_out_or_breaks_is_not_taken_for_one_that_was_held(
    make: Make, outside: Witness, driver: Driver
) -> None:
    if driver.name != "fake":
        pytest.skip("where nothing isolates")
    _, sandbox = await make()
    reads = Escape("read", 'return secrets_in([HOST["file"]])')
    connects = Escape("connect", 'socket.create_connection(tuple(HOST["tcp"][0])).close()')
    breaks = Escape("break", "return 1 / 0")
    for escape, word in ((reads, "canary"), (connects, "a connection came"), (breaks, "broken")):
        outcome = await attempt(sandbox, escape, outside)
        assert not outcome.held
        assert word in outcome.got
    assert json.dumps(outside.facts).count(outside.secret) == 0
