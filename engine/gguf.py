"""A bounded reader of GGUF files. A hostile or torn file gives a sentence, never a crash or a huge allocation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from engine.errors import ModelFileError
from engine.ggufheader import Entry, Header, count_of, read_header
from engine.mapped import map_file

if TYPE_CHECKING:
    import numpy as np

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
            header = read_header(path, self._take, _QUANTS)
            self.metadata, self.tensors = header.metadata, self._places(header)
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
        rows = raw.reshape(*info.shape[:-1], info.size_bytes * info.shape[-1] // count_of(info.shape))
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

    def _take(self, size: int) -> bytes:
        data = bytes(self._map[self._pos : self._pos + size])
        self._pos += len(data)
        return data

    def _places(self, header: Header) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for entry in header.entries:
            end = header.size_bytes + entry.relative + entry.size_bytes
            if end > len(self._map):
                raise ModelFileError(
                    f"{self.path} is cut short: {entry.name!r} would end at byte {end}, "
                    f"the file has {len(self._map)}; download it again"
                )
            if entry.name in tensors:
                raise ModelFileError(f"{self.path} holds {entry.name!r} twice")
            tensors[entry.name] = _info(entry, header.size_bytes)
        return tensors


def _info(entry: Entry, base: int) -> TensorInfo:
    return TensorInfo(entry.name, entry.shape, entry.quant, base + entry.relative, entry.size_bytes)
