"""The weights on a GPU: vectors, and matrices in the model's own type, in 4 bits, or in e4m3.

Quantised are the projections of every layer. The embedding stays as it is, for a row of it is read and not multiplied;
so does the head, whose rounding would go into every choice of a token directly and is averaged by nothing after it, and
so do MLA's absorbed matrices, which are products of their own for every head. A matrix is quantised on the device, a
few rows after the other, so that no more of it than those is ever there in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.checks import PROJECTIONS
from engine.backends.torch_layers import as_tensor
from engine.facts import ModelFacts
from engine.kernels.fp8 import LARGEST, quantise_fp8
from engine.kernels.fp8_gemm import fp8_gemm
from engine.kernels.int4 import GROUP, pack_int4
from engine.kernels.int4_gemm import int4_gemm
from engine.kernels.linear import linear, scratch_elements
from engine.precision import QUANTISED, Precision
from engine.weights import Weights

_TOGETHER = 1 << 24  # weights that are quantised at a time
_LEAST = 2.0**-100  # for rows of zeros, so that no scale is zero


class Matrix(Protocol):
    """Weights [N, K], or [G, N, K] of G groups."""

    @property
    def outputs(self) -> int: ...

    def product(self, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """out = x w^T + bias; x [M, K] or [G, M, K], out [M, N] or [G, M, N], bias fp32 [N]. M is not 0."""
        ...


@dataclass(frozen=True)
class Plain:
    """In the type of the activations."""

    weight: Tensor

    @property
    def outputs(self) -> int:
        return self.weight.shape[-2]

    def product(self, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        groups = x.shape[0] if x.dim() == 3 else 1
        scratch = torch.empty(scratch_elements(x.shape[-2], self.outputs, groups), device=x.device)
        linear(x, self.weight, out, bias, scratch)


@dataclass(frozen=True)
class Int4:
    """See `engine.kernels.int4`."""

    packed: Tensor
    scale: Tensor

    @property
    def outputs(self) -> int:
        return self.packed.shape[0]

    def product(self, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        int4_gemm(x, self.packed, self.scale, out, bias)


@dataclass(frozen=True)
class Fp8:
    """See `engine.kernels.fp8`. `a8`: activations are rounded to e4m3 as well, each row with a scale of its own."""

    weight: Tensor
    scale: Tensor
    a8: bool

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def product(self, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        narrow, x_scale = _rounded(x) if self.a8 else (x, None)
        fp8_gemm(narrow, self.weight, self.scale, out, x_scale=x_scale, bias=bias)


@dataclass(frozen=True)
class GpuLayer:
    """`vectors`: norms and biases, fp32."""

    vectors: dict[str, Tensor]
    matrices: dict[str, Matrix]


def load_layer(weights: Weights, facts: ModelFacts, layer: int, dtype: str, device: torch.device) -> GpuLayer:
    """Layer `layer` on the device; see `Weights` for its names. Of MLA's `kv_b`, `k_up` and `v_up` are made."""
    prefix = f"{layer}."
    vectors: dict[str, Tensor] = {}
    matrices: dict[str, Matrix] = {}
    for whole in (name for name in weights.arrays if name.startswith(prefix)):
        name, tensor = whole.removeprefix(prefix), as_tensor(weights.arrays[whole])
        if tensor.dim() == 1:
            vectors[name] = tensor.to(device)
        elif name == "kv_b":
            matrices |= _absorbed(tensor.to(device), facts)
        else:
            matrices[name] = _MAKERS[dtype](tensor, device) if name in PROJECTIONS else Plain(tensor.to(device))
    return GpuLayer(vectors, matrices)


def device_bytes(weights: Weights, precision: Precision) -> int:
    """What these weights take on the device."""
    sizes = {"w4a16": 0.5 + 2 / GROUP, "w8a16": 1.0, "w8a8": 1.0}
    total = 0
    for name, array in weights.arrays.items():
        narrow = precision.dtype in QUANTISED and name.partition(".")[2] in PROJECTIONS
        row_bytes = 4 if narrow and precision.dtype != "w4a16" else 0
        total += int(array.size * sizes[precision.dtype]) + len(array) * row_bytes if narrow else array.nbytes
    return total


def _absorbed(kv_b: Tensor, facts: ModelFacts) -> Iterator[tuple[str, Matrix]]:
    mla = facts.mla
    assert mla is not None
    up = kv_b.view(facts.heads, mla.nope_size + mla.value_size, mla.kv_rank)
    yield "k_up", Plain(up[:, : mla.nope_size].transpose(1, 2).contiguous())  # [H, rank, nope]
    yield "v_up", Plain(up[:, mla.nope_size :].contiguous())  # [H, value, rank]


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantise_fp8`, in operators that a captured step may have."""
    wide = x.float()
    scale = wide.abs().amax(1).clamp(min=_LEAST) / LARGEST
    return (wide / scale[:, None]).to(torch.float8_e4m3fn), scale


def _by_rows(pack: Callable[[Tensor], tuple[Tensor, Tensor]], weight: Tensor, device: torch.device) -> list[Tensor]:
    """What `pack` makes of a matrix; every row is packed by itself."""
    rows = max(1, _TOGETHER // weight.shape[1])
    parts = [pack(weight[at : at + rows].to(device)) for at in range(0, len(weight), rows)]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _fp8(weight: Tensor, device: torch.device, *, a8: bool) -> Fp8:
    values, scale = _by_rows(lambda rows: _as_bytes(quantise_fp8(rows)), weight, device)
    return Fp8(values.view(torch.float8_e4m3fn), scale, a8)


def _as_bytes(packed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return packed[0].view(torch.uint8), packed[1]


_MAKERS: dict[str, Callable[[Tensor, torch.device], Matrix]] = {
    "bf16": lambda weight, device: Plain(weight.to(device)),
    "fp32": lambda weight, device: Plain(weight.to(device)),
    "w4a16": lambda weight, device: Int4(*_by_rows(pack_int4, weight, device)),
    "w8a16": lambda weight, device: _fp8(weight, device, a8=False),
    "w8a8": lambda weight, device: _fp8(weight, device, a8=True),
}
