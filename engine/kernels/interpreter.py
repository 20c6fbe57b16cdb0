"""Makes Triton's interpreter (3.6 to 3.9) compute with the numbers that a GPU has. For tests and dry runs.

As it comes, it keeps bfloat16 as raw 16-bit integers, on which products, sums and maxima are silent garbage, cuts
float32 short where it should round, and wraps around where a cast to fp8 should saturate. Here a bfloat16 tile is an
array of `ml_dtypes.bfloat16`, with numpy's arithmetic; casts round to the nearest even and saturate, as
`cvt.rn.satfinite` does. A dot takes every row by itself, so that the bits of a row depend neither on how many rows the
tile has nor on the place of the row in it, as on tensor cores.

It replaces internals of Triton: `check` says in a sentence when a version has moved them.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as internals

from engine.errors import BackendUnavailable
from engine.kernels.target import INTERPRETED

Array = np.ndarray[Any, Any]

_BF16 = np.dtype(ml_dtypes.bfloat16)
_BITS = np.dtype(np.uint16)
_SMALL = {
    tl.bfloat16: _BF16,
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_applied = False


def apply() -> None:
    """Mend the interpreter, once; nothing where kernels are compiled. Raises BackendUnavailable, see `check`."""
    global _applied
    if not INTERPRETED or _applied:
        return
    builder = internals.InterpreterBuilder
    _plain_dtype = internals._get_np_dtype
    internals._get_np_dtype = _with_bf16(_plain_dtype)
    builder.cast_impl = _casting(builder.cast_impl)
    builder.create_fp_to_fp = _casting(builder.create_fp_to_fp)
    builder.create_dot = _dot
    builder.get_bf16 = lambda self, value: internals.TensorHandle(np.array([value], dtype=_BF16), tl.bfloat16)
    internals._interpreter = _Memory(internals._interpreter)
    internals.GridExecutor.__call__ = _quietly(internals.GridExecutor.__call__)
    internals.inspect = _Members(internals.inspect)
    _applied = True
    check()


def check() -> None:
    """Launch a small kernel and compare. Raises BackendUnavailable where bfloat16 or fp8 comes out wrong."""
    a = torch.linspace(-3, 3, 256).reshape(16, 16).to(torch.bfloat16)
    b = torch.linspace(1, -2, 256).reshape(16, 16).to(torch.bfloat16)
    product, narrow, least = torch.empty(16, 16), torch.empty(16, dtype=torch.float8_e4m3fn), torch.empty(16)
    _probe[(1,)](a, b, product, narrow, least, 16)
    wide = a.double() @ b.double()
    exact = torch.allclose(product.double(), wide.bfloat16().double(), rtol=1e-2, atol=1e-2)
    rounded = torch.equal(product, product.bfloat16().float()) and torch.equal(least, a.float().amin(1))
    saturated = torch.equal(narrow.float(), torch.full((16,), 448.0))
    if not (exact and rounded and saturated):
        raise BackendUnavailable(
            f"the interpreter of Triton {triton.__version__} computes bfloat16 or fp8 in another way than "
            "engine/kernels/interpreter.py knows; 3.6 to 3.9 are known"
        )


@triton.jit
def _probe(a_ptr, b_ptr, product_ptr, narrow_ptr, least_ptr, n):
    row = tl.arange(0, 16)
    at = row[:, None] * 16 + row[None, :]
    a = tl.load(a_ptr + at, mask=at < n * 16, other=0.0)
    b = tl.load(b_ptr + at)
    first = tl.load(a_ptr, mask=n > 0, other=0.0)  # a scalar under a scalar mask
    product = tl.dot(a, b).to(tl.bfloat16)
    tl.store(product_ptr + at, product.to(tl.float32))
    tl.store(narrow_ptr + row, (tl.zeros([16], tl.float32) - first.to(tl.float32) * 1000.0).to(tl.float8e4nv))
    tl.store(least_ptr + row, tl.min(a, 1).to(tl.float32))


def _with_bf16(plain: Any) -> Any:
    def dtype_of(kind: Any) -> Any:
        pointers = isinstance(kind, tl.pointer_type) or isinstance(getattr(kind, "element_ty", None), tl.pointer_type)
        return _BF16 if not pointers and kind.scalar == tl.bfloat16 else plain(kind)

    return dtype_of


def _widened(handle: Any) -> Array:
    """The values of a tile, small floats as float32."""
    kind = handle.dtype.scalar
    if kind in _SMALL:
        return np.asarray(handle.data.view(_SMALL[kind]).astype(np.float32))
    return np.asarray(handle.data)


def _casting(plain: Any) -> Any:
    def cast(self: Any, source: Any, kind: Any, *rounding: Any) -> Any:
        wanted = kind.scalar
        if source.dtype.scalar not in _SMALL and wanted not in _SMALL:
            return plain(self, source, kind, *rounding)
        values = _widened(source)
        if wanted in _LARGEST:  # NaN stays NaN
            values = np.clip(values.astype(np.float32), -_LARGEST[wanted], _LARGEST[wanted])
        if wanted in _SMALL:
            stored = values.astype(_SMALL[wanted])
            return internals.TensorHandle(stored if wanted == tl.bfloat16 else stored.view(np.uint8), wanted)
        return internals.TensorHandle(values.astype(internals._get_np_dtype(wanted)), wanted)

    return cast


def _dot(self: Any, a: Any, b: Any, added: Any, *precision: Any) -> Any:
    """[.., M, K] @ [.., K, N] + [.., M, N], each of the M rows in a product of its own."""
    left, right = (_wide_operand(handle) for handle in (a, b))
    rows = np.matmul(left[..., :, None, :], right[..., None, :, :], dtype=added.data.dtype)
    return internals.TensorHandle(rows[..., 0, :] + added.data, added.dtype.scalar)


def _wide_operand(handle: Any) -> Array:
    values = _widened(handle)
    return values.astype(np.float32) if handle.dtype.scalar == tl.float16 else values


class _Memory:
    """Loads and stores of the interpreter, whose native half knows no bfloat16 and, in 3.9, no scalar masks."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def load(self, pointers: Array, mask: Array, other: Array, kind: Any) -> Array:
        if kind != _BF16:
            return np.asarray(self._plain.load(pointers, _boolean(mask), other, kind))
        raw = self._plain.load(pointers, _boolean(mask), np.ascontiguousarray(other).view(_BITS), _BITS)
        return np.asarray(raw.view(_BF16))

    def store(self, pointers: Array, values: Array, mask: Array) -> None:
        raw = np.ascontiguousarray(values).view(_BITS) if values.dtype == _BF16 else values
        self._plain.store(pointers, raw, _boolean(mask))


def _boolean(mask: Array) -> Array:
    return mask if mask.dtype == np.bool_ else mask.astype(np.bool_)


def _quietly(plain: Any) -> Any:
    """A GPU does not warn about infinities and NaN; masked lanes are full of them."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return plain(self, *args, **kwargs)

    return call


class _Members:
    """`inspect` for the interpreter, which at every call of a function looks through all of `triton.language` for its
    builtins: a fifth of its time. Which names those are is looked up once."""

    def __init__(self, plain: Any) -> None:
        self._plain, self._names = plain, dict[int, list[str]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def getmembers(self, owner: Any, *chosen: Any) -> list[tuple[str, Any]]:
        if chosen:
            return list(self._plain.getmembers(owner, *chosen))
        if id(owner) not in self._names:
            members = self._plain.getmembers(owner)
            self._names[id(owner)] = [name for name, member in members if tl.core.is_builtin(member)]
        return [(name, getattr(owner, name)) for name in self._names[id(owner)]]
