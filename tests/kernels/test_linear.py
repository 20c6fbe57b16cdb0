"""Products with weights in the interpreter: against float64, and a row's bits whatever the number of rows."""

from __future__ import annotations

import pytest
import torch

from engine.errors import UnsupportedShape
from engine.kernels.linear import FEW_ROWS, config_for, linear, meaning, scratch_elements
from tests.kernels.conftest import DTYPES


def run(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.full((*x.shape[:-1], w.shape[-2]), float("nan"))
    groups = x.shape[0] if x.dim() == 3 else 1
    linear(x, w, y, bias, torch.full((scratch_elements(x.shape[-2], w.shape[-2], groups),), float("nan")))
    return y


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("columns", [40, 200], ids=["ranges-of-k", "whole-k"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_many(dtype: torch.dtype, columns: int) -> None:
    rows = FEW_ROWS + 6
    x, w, bias = numbers(rows, 80, dtype=dtype), numbers(columns, 80, dtype=dtype, seed=1), numbers(columns, seed=2)
    assert (config_for(columns).splits > 1) == (columns == 40)
    many = run(x, w, bias)
    assert float((many.double() - meaning(x, w, bias)).abs().max()) < 1e-4
    for part in (slice(0, 1), slice(69, 70), slice(3, 20), slice(0, FEW_ROWS)):
        assert torch.equal(run(x[part], w, bias), many[part])


def test_strided_rows_and_groups_are_each_multiplied_by_their_own_weight() -> None:
    x, w = numbers(6, 4, 48)[:, :3].transpose(0, 1)[:, ::2], numbers(3, 17, 48, seed=1)
    assert not x.is_contiguous()
    assert float((run(x, w).double() - meaning(x, w)).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("x", "w", "said"),
    [
        ((2, 16), (4, 17), r"x \[1, 2, 16\] times w \[1, 4, 17\]"),
        ((2, 16), (4, 16), "scratch"),
    ],
)
def test_what_does_not_fit_is_refused(x: tuple[int, int], w: tuple[int, int], said: str) -> None:
    with pytest.raises(UnsupportedShape, match=said):
        linear(numbers(*x), numbers(*w), torch.empty(2, 4))


def test_two_types_are_refused() -> None:
    with pytest.raises(UnsupportedShape, match="one type"):
        linear(numbers(2, 16), numbers(200, 16, dtype=torch.float16), torch.empty(2, 200))
