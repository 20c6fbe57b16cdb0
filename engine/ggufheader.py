"""The header of a GGUF file: metadata and tensor table, read from anything that gives bytes in order."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelFileError

_MAX_KEYS = 4096
_MAX_TENSORS = 65_536
_MAX_ARRAY = 4_194_304
_MAX_STRING = 16 * 1024 * 1024
_MAX_DIMS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
Quants = Mapping[int, tuple[str, int, int]]  # id -> name, elements per block, bytes per block


@dataclass(frozen=True)
class Entry:
    """A row of the tensor table. `shape` is row-major; `relative`: where its bytes begin, behind the header."""

    name: str
    shape: tuple[int, ...]
    quant: int
    relative: int
    size_bytes: int


@dataclass(frozen=True)
class Header:
    """`size_bytes`: up to where the tensors begin, alignment included."""

    metadata: dict[str, Any]
    entries: tuple[Entry, ...]
    size_bytes: int


def read_header(name: object, take: Callable[[int], bytes], quants: Quants) -> Header:
    """`take` gives the next so many bytes, or fewer at the end. Raises ModelFileError, in a sentence that begins with
    `name`: a hostile or torn header never makes a huge allocation."""
    return _Reader(name, take, quants).read()


class _Reader:
    def __init__(self, name: object, take: Callable[[int], bytes], quants: Quants) -> None:
        self.path = name
        self._source = take
        self._quants = quants
        self._pos = 0

    def read(self) -> Header:
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
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 65_536:
            raise ModelFileError(f"{self.path} asks for an alignment of {alignment!r}; 1 to 65536 is possible")
        return Header(metadata, tuple(entries), -(-self._pos // alignment) * alignment)

    def _tensor_entry(self) -> Entry:
        name = self._string("a tensor name")
        dims = self._bounded("I", f"the rank of {name!r}", _MAX_DIMS)
        shape = tuple(self._number("Q", f"the shape of {name!r}") for _ in range(dims))[::-1]
        if not shape or any(not 1 <= n <= 1 << 32 for n in shape):
            raise ModelFileError(f"{self.path}: {name!r} has the impossible shape {list(shape)}")
        quant = self._number("I", f"the type of {name!r}")
        if quant not in self._quants:
            known = ", ".join(sorted(q[0] for q in self._quants.values()))
            raise ModelFileError(
                f"{self.path}: {name!r} has the unsupported tensor type {quant}; supported are {known}"
            )
        _, per_block, block_bytes = self._quants[quant]
        relative = self._number("Q", f"the offset of {name!r}")
        if shape[-1] % per_block:
            raise ModelFileError(
                f"{self.path}: rows of {name!r} have {shape[-1]} values, not a multiple of {per_block}"
            )
        return Entry(name, shape, quant, relative, count_of(shape) // per_block * block_bytes)

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
        data = self._source(size)
        if len(data) < size:
            raise ModelFileError(f"{self.path} is cut short: it ends inside {what}; download it again")
        self._pos += size
        return data


def count_of(shape: tuple[int, ...]) -> int:
    """How many values a tensor of this shape has."""
    total = 1
    for n in shape:
        total *= n
    return total
