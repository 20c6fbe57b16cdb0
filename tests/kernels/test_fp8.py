"""Weights and activations in e4m3 in the interpreter: how they are made, and both kernels against float64."""

from __future__ import annotations

import pytest
import torch

from engine.errors import UnsupportedShape
from engine.kernels import fp8_gemm as gemm
from engine.kernels import fp8_gemv as gemv
from engine.kernels.fp8 import quantise_fp8


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_value() -> torch.Tensor:
    """All e4m3 but the two NaN: [1, 256], zeros in their places."""
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    return torch.where(values.float().isnan(), torch.zeros(()), values.float()).to(torch.float8_e4m3fn)[None]


def test_a_quantised_row_reaches_the_largest_value_and_a_row_of_zeros_stays_so():
    values = numbers(3, 64)
    values[1] = 0.0
    stored, scale = quantise_fp8(values)
    assert stored.float().abs().amax(1).tolist() == [448.0, 0.0, 448.0]
    off = (stored.float() * scale[:, None] - values).abs()
    assert bool((off <= values.abs() / 16 + scale[:, None] * 2**-10).all())  # half of 2^-3, or half a subnormal


@pytest.mark.parametrize("natively", [True, False], ids=["by-conversion", "by-bits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_value_of_a_weight_is_read_exactly(dtype, natively):
    weight, one = every_value(), torch.ones(1)
    x = torch.eye(256).to(dtype)
    y = torch.empty(256, 1)
    gemm.fp8_gemm(x, weight, one, y, natively=natively)
    assert torch.equal(y[:, 0], weight[0].float())
    gemv.fp8_gemv(x[::16], weight, one, z := torch.empty(16, 1), natively=natively)
    assert torch.equal(z[:, 0], weight[0, ::16].float())


@pytest.mark.parametrize("natively", [True, False], ids=["by-conversion", "by-bits"])
def test_activations_in_e4m3_are_scaled_by_row(natively):
    weight, scale = quantise_fp8(numbers(40, 144))
    x, x_scale = quantise_fp8(numbers(19, 144, seed=1) * torch.arange(1, 20)[:, None])
    y = torch.empty(19, 40)
    gemm.fp8_gemm(x, weight, scale, y, x_scale=x_scale, natively=natively)
    assert float((y.double() - gemm.meaning(x, weight, scale, x_scale=x_scale)).abs().max()) < 1e-3


@pytest.mark.parametrize("wide", [True, False], ids=["w8a16", "w8a8"])
def test_a_row_has_the_same_bits_alone_at_any_place_and_among_many(wide):
    weight, scale = quantise_fp8(numbers(40, 208))
    x, x_scale = numbers(35, 208, seed=1).to(torch.bfloat16), None
    if not wide:
        x, x_scale = quantise_fp8(x)
    gemm.fp8_gemm(x, weight, scale, many := torch.empty(35, 40), x_scale=x_scale)
    for rows in (slice(0, 1), slice(7, 8), slice(20, 35)):
        part = torch.empty(x[rows].shape[0], 40)
        gemm.fp8_gemm(x[rows], weight, scale, part, x_scale=None if x_scale is None else x_scale[rows])
        assert torch.equal(part, many[rows])


def test_rows_of_odd_length_are_refused_in_a_sentence():
    weight, one = torch.zeros(4, 24).to(torch.float8_e4m3fn), torch.ones(4)
    said = "rows of 24 weights are not a multiple of 16 .*TENUTO_ENGINE_DTYPE = bf16"
    for kernel in (gemm.fp8_gemm, gemv.fp8_gemv):
        with pytest.raises(UnsupportedShape, match=said):
            kernel(numbers(1, 24), weight, one, torch.empty(1, 4))
