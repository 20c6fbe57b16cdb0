"""A bounded reader of safetensors files. A hostile or torn file gives a sentence, never a crash or a huge allocation.

Format: header length (8 bytes, little-endian), a JSON header, then the tensors, back to back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ModelFileError
from engine.mapped import map_file

_MAX_HEADER = 64 * 1024 * 1024
_MAX_TENSORS = 65_536
_MAX_DIMS = 8
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Span:
    """One tensor: `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class SafetensorsFile:
    """The tensor table of one file; tensors are read on demand, in fp32.

    Raises ModelFileError, in a sentence, for anything that is not a whole file of fp32, fp16 and bf16 tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path, "safetensors")
        try:
            self.tensors = self._read_table()
        except ModelFileError:
            self._map.close()
            raise

    @property
    def size_bytes(self) -> int:
        return len(self._map)

    def close(self) -> None:
        self._map.close()

    def tensor(self, name: str) -> Array:
        """fp32, shape as in the table."""
        span = self.tensors[name]
        raw = self._map[span.offset : span.offset + span.size_bytes]
        if span.dtype == "F32":
            return np.frombuffer(raw, np.float32).reshape(span.shape)
        if span.dtype == "F16":
            return np.frombuffer(raw, np.float16).astype(np.float32).reshape(span.shape)
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(span.shape)

    def _read_table(self) -> dict[str, Span]:
        size = int.from_bytes(self._map[:8], "little")
        if len(self._map) < 8 or size > len(self._map) - 8:
            raise ModelFileError(f"{self.path} is cut short: it ends inside its header; download it again")
        if size > _MAX_HEADER:
            raise ModelFileError(f"{self.path} has a header of {size} bytes, more than the {_MAX_HEADER} sensible")
        try:
            header = json.loads(self._map[8 : 8 + size], object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{self.path} is not a safetensors file: its header is no JSON: {error}") from error
        if not isinstance(header, dict) or len(header) > _MAX_TENSORS:
            raise ModelFileError(f"{self.path} is not a safetensors file: its header is no table of tensors")
        table = {name: self._span(name, entry, 8 + size) for name, entry in header.items() if name != "__metadata__"}
        self._check_places(table, 8 + size)
        return table

    def _span(self, name: str, entry: object, base: int) -> Span:
        fields = entry if isinstance(entry, dict) else {}
        dtype: Any = fields.get("dtype")
        shape: Any = fields.get("shape")
        offsets: Any = fields.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _SIZES:
            raise ModelFileError(
                f"{self.path}: {name!r} is of the type {dtype!r}; {', '.join(_SIZES)} are supported, quantised ones not"
            )
        if not _counts(shape, _MAX_DIMS) or not _counts(offsets, 2) or len(offsets) != 2:
            raise ModelFileError(f"{self.path}: {name!r} has an impossible shape or place")
        size = _SIZES[dtype]
        for n in shape:
            size *= n
        if offsets[1] - offsets[0] != size:
            raise ModelFileError(
                f"{self.path}: {name!r} of shape {shape} needs {size} bytes and has {offsets[1] - offsets[0]}"
            )
        return Span(dtype, tuple(shape), base + offsets[0], size)

    def _check_places(self, table: dict[str, Span], at: int) -> None:
        """Tensors fill the file from the header to the end, without holes and without sharing a byte."""
        for name, span in sorted(table.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
            if span.offset != at:
                raise ModelFileError(f"{self.path}: {name!r} does not begin where the tensor before it ends")
            at += span.size_bytes
        if at > len(self._map):
            raise ModelFileError(
                f"{self.path} is cut short: its tensors would end at byte {at}, the file has {len(self._map)};"
                " download it again"
            )
        if at < len(self._map):
            raise ModelFileError(f"{self.path} has {len(self._map) - at} bytes that belong to no tensor")


def _counts(value: Any, most: int) -> bool:
    """Whether it is a list of at most so many sizes."""
    if not isinstance(value, list) or len(value) > most:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= 1 << 48 for n in value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("it names something twice")
    return table
