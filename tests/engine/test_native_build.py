"""The cache of built libraries, with a compiler that only keeps a diary."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import BackendUnavailable
from engine.native import Library, build
from tests.engine.conftest import NATIVE

SCRIPT = """#!/bin/sh
if [ "$1" = -v ]; then echo "version {version}"; exit 0; fi
echo built >> {diary}
{body}
for last; do :; done
echo "library" > "$last"
"""


class Compiler:
    """A compiler in a directory of its own; `builds` is how often it was run to build."""

    def __init__(self, directory: Path, version: str = "1", body: str = "") -> None:
        directory.mkdir()
        self._diary = directory / "diary"
        self.path = directory / "c++"
        self.path.write_text(SCRIPT.format(version=version, diary=self._diary, body=body))
        self.path.chmod(0o755)

    @property
    def builds(self) -> int:
        return len(self._diary.read_text().splitlines()) if self._diary.exists() else 0


def quiet(done: float) -> None:
    return None


def test_a_library_is_built_once_and_then_found(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path / "a")
    told: list[float] = []
    first = build(tmp_path / "cache", told.append, str(compiler.path))
    second = build(tmp_path / "cache", told.append, str(compiler.path))
    assert first == second
    assert compiler.builds == 1
    assert told == [0.0, 1.0, 1.0]
    assert first.path.read_text() == "library\n"


def test_another_version_of_the_compiler_builds_its_own(tmp_path: Path) -> None:
    keys = {build(tmp_path / "cache", quiet, str(Compiler(tmp_path / version, version).path)).key for version in "12"}
    assert len(keys) == 2


@pytest.mark.parametrize("suffix", [".so", ".sha256"])
@pytest.mark.parametrize("damage", [lambda p: p.write_text("torn"), lambda p: p.unlink()], ids=["torn", "gone"])
def test_a_library_that_is_not_whole_is_built_again(tmp_path: Path, suffix: str, damage: object) -> None:
    compiler = Compiler(tmp_path / "a")
    built = build(tmp_path / "cache", quiet, str(compiler.path))
    assert callable(damage)
    damage(built.path.with_suffix(suffix))
    assert build(tmp_path / "cache", quiet, str(compiler.path)) == built
    assert compiler.builds == 2
    assert built.path.read_text() == "library\n"


def test_nothing_but_the_library_and_its_digest_stays(tmp_path: Path) -> None:
    built = build(tmp_path / "cache", quiet, str(Compiler(tmp_path / "a").path))
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {
        built.path.name,
        built.path.with_suffix(".sha256").name,
    }


def test_what_the_compiler_complains_of_is_told(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path / "a", body="echo 'kernels.h:1: no room' >&2; exit 1")
    with pytest.raises(BackendUnavailable, match="no room"):
        build(tmp_path / "cache", quiet, str(compiler.path))
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_compiler_there_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"there is no .*missing-c\+\+"):
        build(tmp_path, quiet, "missing-c++")


def test_what_is_no_library_is_not_loaded(tmp_path: Path) -> None:
    built = build(tmp_path / "cache", quiet, str(Compiler(tmp_path / "a").path))
    with pytest.raises(BackendUnavailable, match="cannot be loaded"):
        Library(built)


def test_a_directory_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendUnavailable, match="cannot be written"):
        build(tmp_path / "file" / "cache", quiet, str(Compiler(tmp_path / "a").path))


@pytest.mark.parametrize("compiler", [True, False])
def test_setup_builds_the_kernels_or_says_that_torch_is_slower(tmp_path: Path, compiler: bool) -> None:
    path = os.environ["PATH"] if compiler else str(tmp_path)
    if compiler and NATIVE.exists():
        shutil.copytree(NATIVE, tmp_path / "native")
    done = subprocess.run(
        [sys.executable, "-m", "engine.native", str(tmp_path / "native")],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("ready for" in done.stdout) == (compiler and shutil.which("g++") is not None)
    assert ("several times slower" in done.stdout) == ("ready for" not in done.stdout)
