"""A bounded reader of GGUF files. A hostile or torn file gives a sentence, never a crash or a huge allocation."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from engine.errors import ModelFileError
from engine.mapped import map_file

if TYPE_CHECKING:
    import numpy as np

_MAX_KEYS = 4096
_MAX_TENSORS = 65_536
_MAX_ARRAY = 4_194_304
_MAX_STRING = 16 * 1024 * 1024
_MAX_DIMS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# name -> (elements per block, bytes per block); ids as in the GGUF specification
_QUANTS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` is row-major (rows first), `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    quant: int
    offset: int
    size_bytes: int

    @property
    def quant_name(self) -> str:
        return _QUANTS[self.quant][0]


class GgufFile:
    """Header, metadata and tensor table of one file; tensors are read on demand.

    Use as a context manager. Raises ModelFileError, in a sentence, for anything that is not a whole GGUF v2/v3 file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path, "GGUF")
        self._pos = 0
        try:
            self.metadata, self.tensors = self._read_header()
        except ModelFileError:
            self._map.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def digest(self) -> str:
        """sha256 of the whole file, in hex."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(8 * 1024 * 1024):
                digest.update(chunk)
        return digest.hexdigest()

    def tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The tensor dequantised to fp32, shape as in the table."""
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        info, raw = self.tensors[name], self._raw(name)
        if info.quant_name == "F32":
            return raw.view(np.float32).reshape(info.shape)
        if info.quant_name == "BF16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
        if info.quant_name == "F16":
            return raw.view(np.float16).astype(np.float32).reshape(info.shape)
        rows = raw.reshape(*info.shape[:-1], info.size_bytes * info.shape[-1] // _count(info.shape))
        values = dequantize(rows, GGMLQuantizationType(info.quant))
        return np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape)

    def blocks(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor as the file holds it: [..., blocks, bytes of a block]."""
        info = self.tensors[name]
        _, per_block, block_bytes = _QUANTS[info.quant]
        return self._raw(name).reshape(*info.shape[:-1], info.shape[-1] // per_block, block_bytes)

    def _raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        import numpy as np

        info = self.tensors[name]
        return np.frombuffer(self._map[info.offset : info.offset + info.size_bytes], dtype=np.uint8)

    # -- header -----------------------------------------------------------------------------------------------

    def _read_header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._take(4, "its magic") != b"GGUF":
            raise ModelFileError(f"{self.path} is not a GGUF file: it does not start with 'GGUF'")
        version = self._number("I", "its version")
        if version not in (2, 3):
            raise ModelFileError(f"{self.path} is GGUF version {version}; versions 2 and 3 can be read")
        tensor_count = self._bounded("Q", "its tensor count", _MAX_TENSORS)
        key_count = self._bounded("Q", "its metadata count", _MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string("a metadata key")
            kind = self._number("I", f"the type of {key!r}")
            metadata[key] = self._value(kind, key, depth=0)
        return metadata, self._read_tensors(tensor_count, metadata)

    def _read_tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
        entries = [self._tensor_entry() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 65_536:
            raise ModelFileError(f"{self.path} asks for an alignment of {alignment!r}; 1 to 65536 is possible")
        base = -(-self._pos // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, quant, relative in entries:
            _, per_block, block_bytes = _QUANTS[quant]
            if shape[-1] % per_block:
                raise ModelFileError(
                    f"{self.path}: rows of {name!r} have {shape[-1]} values, not a multiple of {per_block}"
                )
            size = _count(shape) // per_block * block_bytes
            if base + relative + size > len(self._map):
                raise ModelFileError(
                    f"{self.path} is cut short: {name!r} would end at byte {base + relative + size}, "
                    f"the file has {len(self._map)}; download it again"
                )
            if name in tensors:
                raise ModelFileError(f"{self.path} holds {name!r} twice")
            tensors[name] = TensorInfo(name, shape, quant, base + relative, size)
        return tensors

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor name")
        dims = self._bounded("I", f"the rank of {name!r}", _MAX_DIMS)
        shape = tuple(self._number("Q", f"the shape of {name!r}") for _ in range(dims))[::-1]
        if not shape or any(not 1 <= n <= 1 << 32 for n in shape):
            raise ModelFileError(f"{self.path}: {name!r} has the impossible shape {list(shape)}")
        quant = self._number("I", f"the type of {name!r}")
        if quant not in _QUANTS:
            known = ", ".join(sorted(q[0] for q in _QUANTS.values()))
            raise ModelFileError(
                f"{self.path}: {name!r} has the unsupported tensor type {quant}; supported are {known}"
            )
        return name, shape, quant, self._number("Q", f"the offset of {name!r}")

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], f"the value of {key!r}")
        if kind != _ARRAY or depth > 1:
            raise ModelFileError(f"{self.path}: {key!r} has the unknown value type {kind}")
        inner = self._number("I", f"the type of {key!r}")
        count = self._bounded("Q", f"the length of {key!r}", _MAX_ARRAY)
        if inner in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[inner]}")
            return list(layout.unpack(self._take(layout.size, f"the value of {key!r}")))
        return [self._value(inner, key, depth + 1) for _ in range(count)]

    def _string(self, what: str) -> str:
        size = self._bounded("Q", f"the length of {what}", _MAX_STRING)
        return self._take(size, what).decode("utf-8", errors="replace")

    def _bounded(self, code: str, what: str, limit: int) -> int:
        value = self._number(code, what)
        if value > limit:
            raise ModelFileError(f"{self.path}: {what} is {value}, more than the {limit} that is sensible")
        return int(value)

    def _number(self, code: str, what: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack(self._take(layout.size, what))[0]

    def _take(self, size: int, what: str) -> bytes:
        if self._pos + size > len(self._map):
            raise ModelFileError(f"{self.path} is cut short: it ends inside {what}; download it again")
        data = self._map[self._pos : self._pos + size]
        self._pos += size
        return data


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
