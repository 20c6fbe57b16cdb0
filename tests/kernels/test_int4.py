"""Four-bit weights in the interpreter: their packing, and both kernels against float64."""

from __future__ import annotations

import pytest
import torch

from engine.errors import UnsupportedShape
from engine.kernels import int4_gemm as gemm
from engine.kernels import int4_gemv as gemv
from engine.kernels.int4 import pack_int4, unpack_int4


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_packed_weight_is_off_by_half_a_step_at_most():
    weight = numbers(5, 384)
    weight[1, :128] = 0.0
    weight[2, 5] = -40.0
    packed, scale = pack_int4(weight)
    assert (packed.shape, scale.shape) == ((5, 192), (5, 3))
    step = scale.double().repeat_interleave(128, 1)
    off = (unpack_int4(packed, scale) - weight.double()).abs()
    assert float((off / step).max()) <= 0.55  # the scale itself is rounded to bf16
    assert not unpack_int4(packed, scale)[1, :128].any()


def test_packing_keeps_what_four_bits_can_say():
    levels = torch.arange(-8, 8).repeat(3, 16).float()[:, torch.randperm(256)]
    packed, scale = pack_int4(levels * 0.25)
    assert torch.equal(unpack_int4(packed, scale), levels.double() * 0.25)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_row_has_the_same_bits_alone_at_any_place_and_among_many(dtype):
    packed, scale = pack_int4(numbers(40, 256))
    x = numbers(35, 256, seed=1).to(dtype)
    many = torch.empty(35, 40)
    gemm.int4_gemm(x, packed, scale, many)
    assert float((many.double() - gemm.meaning(x, packed, scale)).abs().max()) < 2e-4
    for rows in (slice(0, 1), slice(7, 8), slice(20, 35)):
        part = torch.empty(x[rows].shape[0], 40)
        gemm.int4_gemm(x[rows], packed, scale, part)
        assert torch.equal(part, many[rows])


def test_strided_rows_and_columns_of_a_wider_result_are_taken_and_nothing_beside_them_is_written():
    packed, scale = pack_int4(numbers(24, 128))
    x = numbers(3, 2, 128, seed=1)[:, 1]
    y = torch.full((3, 30), 7.0)
    gemm.int4_gemm(x, packed, scale, y[:, 3:27])
    gemv.int4_gemv(x, packed, scale, (z := torch.full((3, 30), 7.0))[:, 3:27])
    for result in (y, z):
        assert float((result[:, 3:27].double() - gemm.meaning(x, packed, scale)).abs().max()) < 1e-4
        assert result[:, :3].eq(7.0).all()
        assert result[:, 27:].eq(7.0).all()


def test_rows_that_are_not_whole_groups_are_refused_in_a_sentence():
    said = "rows of 96 weights are not whole groups of 128 .*TENUTO_ENGINE_DTYPE = bf16"
    with pytest.raises(UnsupportedShape, match=said):
        pack_int4(numbers(4, 96))
    packed, scale, x, y = torch.empty(4, 48, dtype=torch.uint8), torch.empty(4, 0), numbers(1, 96), torch.empty(1, 4)
    for kernel in (gemm.int4_gemm, gemv.int4_gemv):
        with pytest.raises(UnsupportedShape, match=said):
            kernel(x, packed, scale, y)
