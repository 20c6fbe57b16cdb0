"""The same weights in llama.cpp's file formats: dequantised to fp32 once, then quantised by llama.cpp itself."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bench.compiled import BenchError, cache_dir
from bench.engine_figures import PURE
from bench.llamacpp import VERSION, Build, Tell
from engine.gguf import GgufFile

# The file types of llama.h, as its tool writes them: the head, which decides what is said, keeps more bits than the
# rest, as in our w4a8. A matrix whose width is no multiple of 256 cannot be Q4_K; llama.cpp then takes Q5_0.
FORMATS = {"bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3, "q4_k": 14, f"q4_0{PURE}": 2}


def files(found: Build, model: Path, tell: Tell, threads: int = 2) -> dict[str, Path]:
    """One file per format, made where it is not there yet. Raises BenchError."""
    with GgufFile(model) as source:
        digest = source.digest()
    directory = cache_dir() / "formats" / digest[:16]
    paths = {name: directory / f"{name}-{VERSION}-mixed.gguf" for name in FORMATS}
    missing = [name for name, path in paths.items() if not path.is_file()]
    if missing:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".make-") as work:
            whole = Path(work) / "f32.gguf"
            tell(f"writing {model.stem} in fp32")
            write_fp32(model, whole)
            for name in missing:
                tell(f"writing {model.stem} in {name}")
                _quantise(found, whole, Path(work) / f"{name}.gguf", name, threads)
                os.replace(Path(work) / f"{name}.gguf", paths[name])
    return paths


def write_fp32(model: Path, target: Path) -> None:
    """The model with every tensor dequantised to fp32 and its metadata as it was."""
    reader = gguf.GGUFReader(model)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            _copy(writer, name, field)
    with GgufFile(model) as source:
        for name, info in source.tensors.items():
            writer.add_tensor_info(name, info.shape, np.dtype(np.float32), 4 * _count(info.shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in source.tensors:
            writer.write_tensor_data(source.tensor(name))
    writer.close()


def _copy(writer: gguf.GGUFWriter, name: str, field: Any) -> None:
    kind = field.types[0]
    inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), kind, sub_type=inner)


def _quantise(found: Build, source: Path, target: Path, name: str, threads: int) -> None:
    calls = found.library()
    pure = name.endswith(PURE)
    if calls.peer_quantize(str(source).encode(), str(target).encode(), FORMATS[name], pure, threads):
        log = calls.peer_log().decode(errors="replace").strip().splitlines()
        raise BenchError(f"llama.cpp could not write {name}: {' / '.join(log[-3:])}")


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
