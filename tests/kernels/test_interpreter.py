from __future__ import annotations

import pytest
import torch

from engine.errors import BackendUnavailable
from engine.kernels import interpreter
from tests.kernels.interpreted import interpreted

with interpreted():
    import triton
    import triton.language as tl

    @triton.jit
    def cast(x_ptr, y_ptr, N: tl.constexpr):
        at = tl.arange(0, N)
        x = tl.load(x_ptr + at)
        tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty))

    @triton.jit
    def arithmetic(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
        at = tl.arange(0, N)
        a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
        tl.store(out_ptr + at, a * b + a)
        tl.store(out_ptr + N, tl.sum(a * b, 0).to(tl.bfloat16))
        tl.store(out_ptr + N + 1, tl.max(a - b, 0))

    @triton.jit
    def dot(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
        m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + n[None, :] * K + k[:, None])
        tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision="ieee"))


ODD = [
    0.0,
    -0.0,
    1.0,
    1.00390625,
    1.01171875,
    3.3e38,
    448.0,
    464.1,
    1e9,
    -1e9,
    0.001,
    1e-40,
    float("inf"),
    -5.7e4,
    7e4,
    0.3,
]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_a_cast_from_float32_rounds_to_the_nearest_even(kind):
    x, y = torch.tensor(ODD), torch.empty(16, dtype=kind)
    cast[(1,)](x, y, N=16)
    assert torch.equal(y, x.to(kind))


@pytest.mark.parametrize(("kind", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)], ids=str)
def test_a_cast_to_fp8_saturates_and_keeps_nan(kind, largest):
    x, y = torch.tensor([*ODD[:-1], float("nan")]), torch.empty(16, dtype=kind)
    cast[(1,)](x, y, N=16)
    assert torch.equal(y[:-1].float(), x[:-1].clamp(-largest, largest).to(kind).float())
    assert y[-1].float().isnan()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_small_floats_widen_exactly(kind):
    x = torch.arange(256, dtype=torch.uint8).view(kind) if kind.itemsize == 1 else torch.randn(256).to(kind)
    y = torch.empty(256)
    cast[(1,)](x, y, N=256)
    assert torch.equal(y.nan_to_num(7), x.float().nan_to_num(7))


def test_bfloat16_multiplies_adds_sums_and_compares():
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(64, generator=generator).bfloat16() for _ in range(2))
    out = torch.empty(66, dtype=torch.bfloat16)
    arithmetic[(1,)](a, b, out, N=64)
    assert torch.equal(out[:64], a * b + a)
    assert out[64].item() == pytest.approx((a * b).double().sum().item(), rel=2e-2, abs=1e-2)
    assert out[65] == (a - b).max()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_row_of_a_dot_has_the_same_bits_in_a_tile_of_any_height_and_at_any_place(kind):
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(rows, 128, generator=generator).to(kind) for rows in (64, 32))
    whole = torch.empty(64, 32)
    dot[(1,)](a, b, whole, M=64, N=32, K=128)
    assert (whole.double() - a.double() @ b.double().T).abs().max() < 1e-3
    for rows in ([5], [5, 63], [63, 5, 0, 7], list(range(40, 56))):
        some = torch.empty(len(rows), 32)
        dot[(1,)](a[rows].contiguous() if kind.itemsize > 1 else _chosen(a, rows), b, some, M=len(rows), N=32, K=128)
        assert torch.equal(some, whole[rows])


def _chosen(a, rows):
    return torch.stack([a[row].view(torch.uint8) for row in rows]).view(a.dtype)


def test_mending_twice_changes_nothing():
    before = interpreter.internals.InterpreterBuilder.create_dot
    interpreter.apply()
    assert interpreter.internals.InterpreterBuilder.create_dot is before


def test_an_interpreter_whose_numbers_are_wrong_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(interpreter, "_LARGEST", {})
    with pytest.raises(BackendUnavailable, match=r"the interpreter of Triton 3\.\d+\.\d+ computes bfloat16 or fp8"):
        interpreter.check()
