"""The structs of the C interface; they mirror those of kernels.h and interface.h."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.facts import ModelFacts

FORMATS = ("bf16", "fp32", "w4a8")  # in the order of Format
JOBS = (
    *("embed", "attention_norm", "qkv", "place", "attend", "merge", "output"),
    *("feed_norm", "gate_up", "down", "head_norm", "head"),
)  # in the order of JobKind
Array = np.ndarray[Any, np.dtype[Any]]
Ints = np.ndarray[Any, np.dtype[np.int32]]


class Shape(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_size", "vocab")),
        ("context", c_int32),
        ("norm_eps", c_float),
        ("format", c_int32),
    ]


class MatrixSource(Structure):
    _fields_ = [("data", c_void_p), ("kinds", c_void_p)]


class LayerSource(Structure):
    _fields_ = [
        ("attn_norm", c_void_p),
        ("qkv", MatrixSource),
        *((name, c_void_p) for name in ("qkv_bias", "q_norm", "k_norm")),
        ("o", MatrixSource),
        ("ffn_norm", c_void_p),
        ("gate_up", MatrixSource),
        ("down", MatrixSource),
        ("window", c_int32),
    ]


class Source(Structure):
    _fields_ = [
        ("embed", c_void_p),
        ("head", MatrixSource),
        *((name, c_void_p) for name in ("norm", "cos", "sin")),
        ("layers", POINTER(LayerSource)),
    ]


class Step(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("pool", "tokens", "blocks", "tiles", "wanted", "logits")),
        *((name, c_int32) for name in ("token_count", "tile_count", "wanted_count")),
        ("landed", c_void_p),
    ]


class JobEntry(Structure):
    _fields_ = [("kind", c_int32), ("layer", c_int32), ("source", c_void_p), ("target", c_void_p), ("items", c_int32)]


@dataclass(frozen=True)
class Job:
    """One dispatch of a step: its kind, one of JOBS; the addresses it reads and writes; the items it shared out."""

    kind: str
    layer: int
    source: int
    target: int
    items: int


@dataclass(frozen=True)
class StepArrays:
    """One step, as Step in interface.h describes it: `tiles` is [tiles, 5], `logits` [wanted, vocab] is written."""

    tokens: Ints
    blocks: Ints
    tiles: Ints
    wanted: Ints
    logits: Array


def shape_of(facts: ModelFacts, dtype: str) -> Shape:
    sizes = (facts.layers, facts.hidden, facts.ffn, facts.heads, facts.kv_heads, facts.head_size, facts.vocab)
    return Shape(*sizes, facts.context, facts.norm_eps, FORMATS.index(dtype))


def source_of(facts: ModelFacts, arrays: dict[str, Array]) -> Source:
    layers = (LayerSource * facts.layers)()
    for index in range(facts.layers):
        for name in ("attn_norm", "qkv_bias", "q_norm", "k_norm", "ffn_norm"):
            setattr(layers[index], name, address(arrays.get(f"{index}.{name}")))
        for name in ("qkv", "o", "gate_up", "down"):
            setattr(layers[index], name, _matrix(arrays, f"{index}.{name}"))
        layers[index].window = facts.window(index)
    head = _matrix(arrays, "head" if "head" in arrays else "embed")
    tables = (address(arrays[name]) for name in ("norm", "cos", "sin"))
    return Source(address(arrays["embed"]), head, *tables, layers)


def step_of(pool: int, step: StepArrays, landed: Array | None = None) -> Step:
    arrays = (step.tokens, step.blocks, step.tiles, step.wanted, step.logits)
    counts = (len(step.tokens), len(step.tiles), len(step.wanted))
    return Step(pool, *(address(array) for array in arrays), *counts, address(landed))


def address(array: Array | None) -> int | None:
    if array is None:
        return None
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def _matrix(arrays: dict[str, Array], name: str) -> MatrixSource:
    return MatrixSource(address(arrays[name]), address(arrays.get(f"{name}.kinds")))
