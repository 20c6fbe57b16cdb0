"""The kernels of w4a8 by themselves, against what their arithmetic means in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.native import INSTRUCTION_SETS
from engine.quantised import Groups, pack
from tests.engine.conftest import native_library
from tests.engine.test_cpu import runnable
from tests.engine.test_quantised import random_groups

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in runnable():
        pytest.skip(f"this processor has no {request.param}")
    return str(request.param)


def values(rows: int, inputs: int, seed: int = 0) -> Array:
    """Groups of very different magnitudes, one of them zero."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((rows, inputs // 32, 32)) * 10.0 ** rng.uniform(-6, 3, (rows, inputs // 32, 1))
    out[0, 0] = 0
    return out.reshape(rows, inputs).astype(np.float32)


def decoded(activations: Array) -> tuple[Array, Array, Array]:
    """int8 [rows, groups, 32], scales and scaled sums [rows, groups]."""
    groups = activations.reshape(len(activations), -1, 10)
    codes = np.ascontiguousarray(groups[..., :8]).view(np.int8)
    ends = np.ascontiguousarray(groups[..., 8:]).view(np.float32)
    return codes.astype(np.int64), ends[..., 0].astype(np.float64), ends[..., 1].astype(np.float64)


def expected(activations: Array, weights: Groups) -> tuple[Array, Array]:
    """The products in float64, and the sum of the magnitudes that went into each: what rounding is measured by."""
    codes, scale, scaled_sum = decoded(activations)
    dots = np.einsum("rgk,cgk->rcg", codes, weights.codes.astype(np.int64))
    by_scale = dots * weights.scale.astype(np.float64) * scale[:, None]
    by_minimum = weights.minimum.astype(np.float64) * scaled_sum[:, None]
    return (by_scale + by_minimum).sum(axis=2), (np.abs(by_scale) + np.abs(by_minimum)).sum(axis=2)


def test_activations_are_the_nearest_of_255_steps(isa: str) -> None:
    x = values(9, 96)
    codes, scale, scaled_sum = decoded(native_library().activations(isa, x))
    groups = x.reshape(9, -1, 32).astype(np.float64)
    top = np.abs(groups).max(axis=2)
    assert np.allclose(scale, top / 127, rtol=1e-6, atol=0)
    assert np.abs(codes).max(axis=2)[top > 0].min() == 127
    assert (np.abs(codes * scale[..., None] - groups) <= 0.50001 * scale[..., None]).all()
    assert np.allclose(scaled_sum, scale * codes.sum(axis=2), rtol=1e-6, atol=0)


def test_activations_are_the_same_on_every_instruction_set(isa: str) -> None:
    x = values(5, 192)
    assert np.array_equal(native_library().activations(isa, x), native_library().activations("plain", x))


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("inputs", [32, 96, 576])
def test_a_product_is_exact_in_its_groups_for_every_kind_and_number_of_rows(isa: str, kind: int, inputs: int) -> None:
    library, weights = native_library(), random_groups(32, kind, inputs, seed=inputs + kind)
    panel, (found_kind,) = pack([weights])
    assert found_kind == kind
    activations = library.activations(isa, values(29, inputs))
    wanted, magnitude = expected(activations, weights)
    alone = np.concatenate([library.product(isa, kind, activations[r : r + 1], panel) for r in range(29)])
    assert (np.abs(alone - wanted) <= 2e-6 * magnitude).all()
    for rows in range(2, 30):
        assert np.array_equal(library.product(isa, kind, activations[:rows], panel), alone[:rows])


@pytest.mark.parametrize("sign", [1, -1])
def test_the_greatest_sums_of_integers_do_not_saturate(isa: str, sign: int) -> None:
    """All codes 255 by all activations 127 overflow 16 bits in pairs already."""
    library = native_library()
    ones = np.ones((32, 2), np.float32)
    weights = Groups(np.full((32, 2, 32), 255, np.uint8), ones, 0 * ones, 8)
    panel, (kind,) = pack([weights])
    activations = library.activations(isa, np.full((1, 64), sign * 127, np.float32))
    assert (library.product(isa, int(kind), activations, panel) == sign * 2 * 32 * 255 * 127).all()


@pytest.mark.parametrize("scale", [6e-8, 6.1e-5, 1.0, 65504.0, 1e30])
def test_scales_are_read_whole_from_the_smallest_to_the_greatest(isa: str, scale: float) -> None:
    library = native_library()
    stored = np.float32(np.float16(scale)) if scale < 1e5 else np.float32(scale)
    one, zero = np.full((32, 1), stored), np.zeros((32, 1), np.float32)
    row = np.zeros((1, 32), np.float32)
    row[0, 3] = 2
    for scales, minimums in ((one, zero), (zero, one)):
        panel, (kind,) = pack([Groups(np.ones((32, 1, 32), np.uint8), scales, minimums, 4)])
        assert kind == (1 if scale > 1e5 else 0)
        found = library.product(isa, int(kind), library.activations(isa, row), panel)
        assert np.allclose(found, 2 * stored, rtol=1e-6, atol=0)
