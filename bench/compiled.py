"""Small C sources of the benches, compiled once per source, flags and compiler into the bench's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O3", "-march=native", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
_TIMEOUT_S = 300.0


class BenchError(Exception):
    """Something that a bench needs could not be had; the message says what and why."""


def cache_dir() -> Path:
    """Where builds and files of the benches are kept, outside of any clone."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tenuto" / "bench"


def run(command: Sequence[str], *, timeout_s: float, env: dict[str, str] | None = None) -> str:
    """The command's standard output. Raises BenchError with its last lines where it fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={**os.environ, **(env or {})},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        last = " / ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-4:])
        raise BenchError(f"{' '.join(command[:3])} failed: {last[:800]}")
    return done.stdout


def compile_c(source: str, into: Path, extra: Sequence[str] = ()) -> Path:
    """The shared library of one source of this package; compiled if it is not there yet."""
    text = (SOURCES / source).read_bytes()
    compiler = run(["gcc", "--version"], timeout_s=_TIMEOUT_S)
    described = "\0".join([compiler, *_FLAGS, *extra, native_flags()]).encode()
    key = hashlib.sha256(described + text).hexdigest()[:16]
    target = into / f"{Path(source).stem}-{key}.so"
    if target.is_file():
        return target
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".compile-") as directory:
        output = Path(directory) / target.name
        run(["gcc", *_FLAGS, str(SOURCES / source), "-o", str(output), *extra], timeout_s=_TIMEOUT_S)
        os.replace(output, target)
    return target


def native_flags() -> str:
    """What the processor can do, as the kernel lists it; a build for one processor is not used on another."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line.partition(":")[2].strip()
    return ""


def load_c(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BenchError(f"{path} cannot be loaded: {error}") from error
