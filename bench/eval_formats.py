"""What the GPU's formats lose, shown on a CPU: weights are packed and unpacked again, pages hold what e4m3 can.

The bits are not the GPU's, whose sums have another order; the information that is lost is the same, but for the bf16
into which weights are unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.compiled import BenchError
from bench.runners import opened_weights
from engine.backends.checks import PROJECTIONS, check_precision
from engine.backends.cpu import Cpu
from engine.backends.face import Backend, Logits, Tile
from engine.backends.torch_layers import as_tensor
from engine.errors import BackendUnavailable
from engine.facts import ModelFacts
from engine.kernels.fp8 import LARGEST, quantise_fp8
from engine.kernels.int4 import pack_int4, unpack_int4
from engine.precision import Precision
from engine.weights import Weights


def opened_format(model: Path, precision: Precision) -> tuple[ModelFacts, Weights]:
    """Facts, and bf16 weights that are worth what the packed ones are. Raises BenchError where the model has none."""
    facts, weights = opened_weights(model, precision.loaded)
    try:
        check_precision(facts, precision)
    except BackendUnavailable as error:
        raise BenchError(str(error)) from error
    if precision.dtype == precision.loaded:
        return facts, weights
    arrays = {
        name: _unpacked(as_tensor(array), precision.dtype).view(torch.uint16).numpy()
        if name.partition(".")[2] in PROJECTIONS
        else array
        for name, array in weights.arrays.items()
    }
    return facts, Weights(weights.dtype, arrays)


class E4m3Pages:
    """A backend whose pages of bf16 are rounded to e4m3 as soon as a step has written them. Tokens that share a page
    see one another before that, so a prompt is computed page by page."""

    def __init__(self, backend: Backend) -> None:
        assert isinstance(backend, Cpu)
        self._backend = backend

    def forward(self, tiles: Sequence[Tile]) -> list[Logits | None]:
        found: dict[int, Logits | None] = {}
        for length in sorted({len(tile.blocks) for tile in tiles}):
            wave = [at for at, tile in enumerate(tiles) if len(tile.blocks) == length]
            rows = self._backend.forward([tiles[at] for at in wave])
            found |= {at: None if row is None else row.copy() for at, row in zip(wave, rows, strict=True)}
            for block in {tiles[at].blocks[-1] for at in wave}:
                page = torch.frombuffer(self._backend.page(block), dtype=torch.bfloat16)
                page.copy_(page.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn))
        return [found[at] for at in range(len(tiles))]


def _unpacked(weight: Tensor, dtype: str) -> Tensor:
    if dtype == "w4a16":
        return unpack_int4(*pack_int4(weight)).to(torch.bfloat16)
    values, scale = quantise_fp8(weight)
    return (values.float() * scale[:, None]).to(torch.bfloat16)
