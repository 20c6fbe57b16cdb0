"""The C interface of the decoder over ctypes; its structs mirror those of kernels.h and decoder.h."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import BackendUnavailable, EngineFault
from engine.facts import ModelFacts
from engine.native.build import Built

INSTRUCTION_SETS = ("plain", "avx2", "avx512bf16")  # in the order of Isa
Array = np.ndarray[Any, np.dtype[Any]]
Ints = np.ndarray[Any, np.dtype[np.int32]]


class _Shape(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_size", "vocab")),
        ("context", c_int32),
        ("norm_eps", c_float),
        ("is_fp32", c_int32),
    ]


_LAYER = ("attn_norm", "qkv", "qkv_bias", "o", "ffn_norm", "gate_up", "down")


class _LayerSource(Structure):
    _fields_ = [(name, c_void_p) for name in _LAYER]


class _Source(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("embed", "head", "norm", "cos", "sin")),
        ("layers", POINTER(_LayerSource)),
    ]


class _Step(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("pool", "tokens", "blocks", "tiles", "wanted", "logits")),
        *((name, c_int32) for name in ("token_count", "tile_count", "wanted_count")),
    ]


class Library:
    """A loaded library. Raises BackendUnavailable where the system will not load it."""

    def __init__(self, built: Built) -> None:
        try:
            self.calls = ctypes.CDLL(str(built.path))
        except OSError as error:
            raise BackendUnavailable(f"{built.path} cannot be loaded: {error}") from error
        self.key = built.key
        self.calls.tenuto_best_isa.argtypes = []
        self.calls.tenuto_best_isa.restype = c_int
        self.calls.tenuto_open.argtypes = [POINTER(_Shape), POINTER(_Source), c_int, c_int]
        self.calls.tenuto_open.restype = c_void_p
        self.calls.tenuto_run.argtypes = [c_void_p, POINTER(_Step)]
        self.calls.tenuto_run.restype = c_int
        self.calls.tenuto_close.argtypes = [c_void_p]
        self.calls.tenuto_close.restype = None

    @property
    def best_instruction_set(self) -> str:
        """The best of INSTRUCTION_SETS that this machine runs."""
        return INSTRUCTION_SETS[int(self.calls.tenuto_best_isa())]


@dataclass(frozen=True)
class StepArrays:
    """One step, as Step in decoder.h describes it: `tiles` is [tiles, 5], `logits` [wanted, vocab] is written."""

    tokens: Ints
    blocks: Ints
    tiles: Ints
    wanted: Ints
    logits: Array


class Decoder:
    """A decoder in C++ and the arrays that it uses where they lie. Not thread-safe.

    `arrays`: the model's weights by name in `dtype`, and `cos` and `sin`, each [context, d/2] in fp32. Raises
    EngineFault where memory is short.
    """

    def __init__(
        self, library: Library, facts: ModelFacts, dtype: str, arrays: dict[str, Array], isa: str, threads: int
    ) -> None:
        self._calls = library.calls
        self._kept = arrays
        shape, source = _shape(facts, dtype), _source(facts, arrays)
        self._handle = self._calls.tenuto_open(byref(shape), byref(source), INSTRUCTION_SETS.index(isa), threads)
        if not self._handle:
            raise EngineFault("there is not enough memory for the packed weights; use a smaller model")

    def run(self, pool: int, step: StepArrays) -> None:
        """Run one step over the pages that begin at address `pool`. The interpreter's lock is free meanwhile."""
        arrays = (step.tokens, step.blocks, step.tiles, step.wanted, step.logits)
        counts = (len(step.tokens), len(step.tiles), len(step.wanted))
        described = _Step(pool, *(_address(array) for array in arrays), *counts)
        if self._calls.tenuto_run(self._handle, byref(described)):
            raise EngineFault(f"there was not enough memory for a step of {len(step.tokens)} tokens")

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle:
            self._handle = None
            self._calls.tenuto_close(handle)


def _shape(facts: ModelFacts, dtype: str) -> _Shape:
    sizes = (facts.layers, facts.hidden, facts.ffn, facts.heads, facts.kv_heads, facts.head_size, facts.vocab)
    return _Shape(*sizes, facts.context, facts.norm_eps, dtype == "fp32")


def _source(facts: ModelFacts, arrays: dict[str, Array]) -> _Source:
    layers = (_LayerSource * facts.layers)()
    for index in range(facts.layers):
        layers[index] = _LayerSource(*(_address(arrays.get(f"{index}.{name}")) for name in _LAYER))
    head = arrays["embed"] if facts.tied_output else arrays["head"]
    ends = (arrays["embed"], head, arrays["norm"], arrays["cos"], arrays["sin"])
    return _Source(*(_address(array) for array in ends), layers)


def _address(array: Array | None) -> int | None:
    if array is None:
        return None
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
