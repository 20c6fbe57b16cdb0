"""Weights, fused the way the model multiplies them, in one file that can be mapped.

File: magic, header length (8 bytes, little-endian), JSON header, then blobs aligned to 64 bytes. The header carries
the source file's digest and its own checksum; a file that does not match is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import WeightsCacheError
from engine.facts import ModelFacts
from engine.modelfile import ModelFile, parts
from engine.quantised import VERSION, pack
from engine.temporaries import prefix, sweep

_MAGIC = b"TENUTOW2"
_ALIGN = 64
Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Weights:
    """Name -> array. Matrices are dequantised to the engine's dtype (bf16 as uint16 bit patterns), the rest to fp32.

    `embed` and `head` [vocab, H], `norm` [H]. Of layer L, each [outputs, inputs]: `L.attn_norm`, `L.qkv`
    [(Hq + 2 Hkv) d, H] with `L.qkv_bias`, `L.q_norm` and `L.k_norm` [d], `L.o` [H, Hq d], `L.ffn_norm`, `L.gate_up`
    [2 F, H], `L.down` [H, F]. With latent attention, instead of `L.qkv`: `L.q_a` [q_rank, H], `L.q_a_norm` and `L.q_b`
    [Hq (nope + rope), q_rank], or `L.q` alone where there is no q_rank; `L.kv_a` [kv_rank + rope, H], `L.kv_a_norm`,
    `L.kv_b` [Hq (nope + value), kv_rank]; and `L.o` is [H, Hq value]. Rows that are rotated are in rotate-half's order.

    In w4a8 a matrix is the bytes of its panels, and NAME.kinds their kinds: see `engine.quantised.pack`. The embedding
    is bf16, and the head is there also where the file ties them.
    """

    dtype: str
    arrays: dict[str, Array]


def load_weights(
    model: ModelFile, digest: str, facts: ModelFacts, dtype: str, cache_dir: Path | None, progress: Progress
) -> Weights:
    """Map the cached weights of this file, building the cache first if it is absent or does not match.

    With `cache_dir` None, or where the cache cannot be written, the weights are built in memory.
    """
    if cache_dir is None:
        return _in_memory(model, facts, dtype, progress)
    path = cache_dir / digest[:32] / f"weights.{dtype}"
    mapped = _map_cache(path, digest, dtype)
    if mapped is not None:
        progress(1.0)
        return mapped
    try:
        _build_cache(path, model, digest, facts, dtype, progress)
    except OSError:
        return _in_memory(model, facts, dtype, progress)
    built = _map_cache(path, digest, dtype)
    if built is None:
        raise WeightsCacheError(f"{path} was written but does not read back; check the disk")
    return built


def _in_memory(model: ModelFile, facts: ModelFacts, dtype: str, progress: Progress) -> Weights:
    return Weights(dtype, dict(_fused(model, facts, dtype, progress)))


def _fused(model: ModelFile, facts: ModelFacts, dtype: str, progress: Progress) -> Iterator[tuple[str, Array]]:
    def array(to: str, *names: str) -> Iterator[tuple[str, Array]]:
        if len(shapes[names[0]]) == 1:
            yield to, np.concatenate([model.values(name) for name in names])
        elif dtype != "w4a8" or to == "embed":
            yield to, _to_dtype(np.concatenate([model.values(name) for name in names]), dtype)
        else:
            groups = [model.groups(name) for name in names]
            yield from zip((to, f"{to}.kinds"), pack(groups, gated=to.endswith("gate_up")), strict=True)

    shapes = parts(facts)
    yield from array("embed", "embed")
    if not facts.tied_output or dtype == "w4a8":
        yield from array("head", "embed" if facts.tied_output else "head")
    yield from array("norm", "norm")
    for layer in range(facts.layers):
        at = f"{layer}."
        for to, *names in _arrays_of_a_layer(facts):
            if at + names[0] in shapes:
                yield from array(at + to, *(at + name for name in names))
        progress((layer + 1) / facts.layers)


def _arrays_of_a_layer(facts: ModelFacts) -> list[tuple[str, ...]]:
    """Each array, and the parts that are multiplied together and so make it up; not every model has all."""
    latent = ("q", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b")
    attention = [(name, name) for name in latent] if facts.mla else [("qkv", "q", "k", "v")]
    alone = [(name, name) for name in ("attn_norm", "q_norm", "k_norm", "o", "ffn_norm", "down")]
    return [*attention, ("qkv_bias", "q_bias", "k_bias", "v_bias"), *alone, ("gate_up", "gate", "up")]


def _to_dtype(value: Array, dtype: str) -> Array:
    """fp32 as it is; else bf16 as bit patterns, rounded to nearest even."""
    if dtype == "fp32":
        return value
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def _build_cache(path: Path, model: ModelFile, digest: str, facts: ModelFacts, dtype: str, progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, "weights")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix("weights"))
    try:
        with os.fdopen(handle, "wb") as out:
            table: dict[str, Any] = {}
            blobs = Path(temporary + ".blobs")
            with blobs.open("w+b") as body:
                for name, value in _fused(model, facts, dtype, progress):
                    body.write(b"\0" * (-body.tell() % _ALIGN))
                    table[name] = {"offset": body.tell(), "shape": list(value.shape), "dtype": str(value.dtype)}
                    body.write(np.ascontiguousarray(value).data)
                header = _header(digest, dtype, table, body.tell())
                out.write(_MAGIC + len(header).to_bytes(8, "little") + header)
                out.write(b"\0" * (-out.tell() % _ALIGN))
                body.seek(0)
                while chunk := body.read(16 * 1024 * 1024):
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary + ".blobs").unlink(missing_ok=True)
        Path(temporary).unlink(missing_ok=True)


def _form(dtype: str) -> str:
    return f"{dtype}.{VERSION}" if dtype == "w4a8" else dtype


def _header(digest: str, dtype: str, table: dict[str, Any], body_bytes: int) -> bytes:
    described = {"source": digest, "dtype": _form(dtype), "tensors": table, "body_bytes": body_bytes}
    text = json.dumps(described, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}).encode()


def _map_cache(path: Path, digest: str, dtype: str) -> Weights | None:
    """The mapped weights, or None when the file is absent, torn or of another model."""
    try:
        with path.open("rb") as file:
            if file.read(8) != _MAGIC:
                return None
            size = int.from_bytes(file.read(8), "little")
            if size > 16 * 1024 * 1024:
                return None
            outer = json.loads(file.read(size))
        described = json.loads(outer["body"])
        checksum = hashlib.sha256(outer["body"].encode()).hexdigest()
        start = -(-(16 + size) // _ALIGN) * _ALIGN
        whole = path.stat().st_size == start + described["body_bytes"]
        if (
            checksum != outer["sha256"]
            or not whole
            or (described["source"], described["dtype"]) != (digest, _form(dtype))
        ):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    memory = np.memmap(path, dtype=np.uint8, mode="c")
    return Weights(dtype, {name: _slice(memory, start, entry) for name, entry in described["tensors"].items()})


def _slice(memory: Array, start: int, entry: dict[str, Any]) -> Array:
    kind = np.dtype(entry["dtype"])
    count = int(np.prod(entry["shape"], dtype=np.int64))
    at = start + int(entry["offset"])
    blob: Array = memory[at : at + count * kind.itemsize].view(kind)
    return blob.reshape([int(n) for n in entry["shape"]])
