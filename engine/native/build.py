"""Builds the C++ sources beside this file, once per source, flags and compiler, into a cache directory.

A cached library is used only while its digest is the one written when it was built.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BackendUnavailable
from engine.temporaries import prefix, sweep

COMPILER = "g++"
# Contracting a * b + c differs between instances of one template; it would make bits depend on the number of rows.
# Units are read as what they hold, two bf16 or one fp32, so types do alias.
FLAGS = (
    "-std=c++17 -O3 -ffp-contract=off -fno-strict-aliasing -fno-math-errno "
    "-fPIC -shared -pthread -fvisibility=hidden -Wl,-Bsymbolic -Wno-psabi"
).split()
SOURCES = Path(__file__).parent
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Built:
    """A shared library, and the key of what it was built from."""

    path: Path
    key: str


def build(cache_dir: Path, progress: Callable[[float], None], compiler: str = COMPILER) -> Built:
    """The library in `cache_dir`, built first if it is not there or not whole: some seconds.

    Raises BackendUnavailable, with the reason, where it cannot be built.
    """
    found = shutil.which(compiler)
    if found is None:
        raise BackendUnavailable(f"there is no {compiler} on this machine to build it with; install one")
    key = _key(found)
    path = cache_dir / f"decoder-{key}.so"
    if not _is_whole(path):
        progress(0.0)
        try:
            _build(path, found)
        except OSError as error:
            raise BackendUnavailable(f"{path} cannot be written: {error.strerror or error}") from error
    progress(1.0)
    return Built(path, key)


def _key(compiler: str) -> str:
    """16 hex digits for sources, flags and compiler."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    digest.update(_run([compiler, "-v"]).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h", ".inl"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _is_whole(path: Path) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == _digest_path(path).read_text()
    except (OSError, ValueError):
        return False


def _build(path: Path, compiler: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, "decoder")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix("decoder")) as directory:
        output = Path(directory) / path.name
        _run([compiler, *FLAGS, *(str(source) for source in sorted(SOURCES.glob("*.cpp"))), "-o", str(output)])
        content = output.read_bytes()
        digest = Path(directory) / "digest"
        digest.write_text(hashlib.sha256(content).hexdigest())
        with output.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(output, path)
        os.replace(digest, _digest_path(path))


def _run(command: list[str]) -> str:
    """What the compiler says. Raises BackendUnavailable with its last lines where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        last = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise BackendUnavailable(f"{command[0]} could not build it: {last[:500]}")
    return done.stdout + done.stderr
