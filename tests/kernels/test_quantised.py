"""Weights in 4 bits and in e4m3, and KV in e4m3, through the Triton backend in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends import gpu_model
from engine.backends.checks import check_precision
from engine.backends.face import Tile, cut
from engine.backends.gpu_weights import Fp8, Int4, Plain, device_bytes, load_layer
from engine.backends.torch_exact import TorchExact
from engine.backends.triton import identity
from engine.errors import BackendUnavailable
from engine.facts import PAGE_SIZE, fingerprint
from engine.kernels.fp8 import quantise_fp8
from engine.kernels.int4 import pack_int4, unpack_int4
from engine.launch import EngineSettings, open_engine
from engine.precision import Precision
from engine.weights import Weights
from tests.engine.conftest import Loaded, load
from tests.engine.tiny_hf import write_hf

PROMPT = [int(n) for n in np.random.default_rng(7).integers(3, 250, 19)]
ENDS = (17, 18, 19)  # a prefill over the end of a page, and single tokens
QUANTISED = ("w4a16", "w8a16", "w8a8")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Whose rows are whole groups of 4-bit weights."""
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    return load(write_hf(tmp_path_factory.mktemp("wide"), "qwen2", **sizes, use_sliding_window=False))


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "q_lora_rank": 128, "v_head_dim": 32}
    return load(write_hf(tmp_path_factory.mktemp("latent"), "deepseek_v3", **sizes))


def logits(backend: Any) -> Any:
    """After each of ENDS: [ends, vocab]."""
    start, rows = 0, []
    for end in ENDS:
        rows.append(backend.forward(cut(range(2), start, PROMPT[start:end]))[-1].copy())
        start = end
    return np.stack(rows)


class RoundsKv(TorchExact):
    """Whose pages hold what e4m3 can say."""

    def _store(self, index: int, tile: Tile, rows: Tensor) -> None:
        super()._store(index, tile, rows.to(torch.float8_e4m3fn).to(rows.dtype))


def rounding(weight: Tensor) -> Any:
    """A product with activations as e4m3 has them, a scale for each row."""

    def product(x: Tensor) -> Tensor:
        values, scale = quantise_fp8(x.bfloat16())
        return (values.float() * scale[:, None]) @ weight.T

    return product


def rounded(loaded: Loaded, dtype: str) -> Weights:
    """In fp32, what the packed weights stand for."""
    arrays = {}
    for name, array in loaded.weights("fp32", None).arrays.items():
        if array.ndim == 2 and "." in name and not name.endswith("kv_b"):
            weight = torch.from_numpy(array).bfloat16()
            if dtype == "w4a16":
                array = unpack_int4(*pack_int4(weight)).float().numpy()
            else:
                values, scale = quantise_fp8(weight)
                array = (values.float() * scale[:, None]).numpy()
        arrays[name] = array
    return Weights("fp32", arrays)


def in_torch(loaded: Loaded, weights: Weights, kind: type[TorchExact] = TorchExact) -> Any:
    return logits(kind(loaded.facts, weights, pool_blocks=2, threads=2))


def off(found: Any, wanted: Any) -> float:
    """The root of the mean square, by that of the deviation of what is wanted."""
    return float(np.sqrt(np.square(found - wanted).mean()) / wanted.std())


@pytest.mark.parametrize(
    ("model", "dtype"), [("wide", "w4a16"), ("latent", "w4a16"), ("wide", "w8a16"), ("wide", "w8a8")]
)
def test_logits_are_those_of_the_weights_that_the_packed_ones_stand_for(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, model: str, dtype: str
) -> None:
    loaded: Loaded = request.getfixturevalue(model)
    exact = in_torch(loaded, loaded.weights("fp32", None))
    if dtype == "w8a8":
        monkeypatch.setattr("engine.backends.torch_layers.linear", rounding)
    wanted = in_torch(loaded, rounded(loaded, dtype))
    found = logits(loaded.backend("triton", dtype, 2))
    assert off(found, wanted) < 0.5 * off(wanted, exact)
    assert off(found, exact) < 1.2 * off(wanted, exact)


def test_kv_in_e4m3_loses_what_its_rounding_loses(wide: Loaded) -> None:
    exact, wanted = (in_torch(wide, wide.weights("fp32", None), kind) for kind in (TorchExact, RoundsKv))
    found = logits(wide.backend("triton", "fp32+e4m3kv", 2))
    assert off(found, wanted) < 0.1 * off(wanted, exact)


def test_chunks_beside_others_leave_the_bits_of_the_whole_prompt(wide: Loaded) -> None:
    backend = wide.backend("triton", "w4a16+e4m3kv", 6)
    whole = backend.forward(cut((0, 1), 0, PROMPT))[-1].copy()
    backend.forward(cut((4,), 0, PROMPT[3:12]))
    for start, end in ((0, 11), (11, 18)):
        backend.forward([*cut((2, 3), start, PROMPT[start:end]), *cut((4,), 9, PROMPT[9:12])])
    found = backend.forward([*cut((2, 3), 18, PROMPT[18:]), *cut((4,), 12, PROMPT[5:6])])[0]
    assert np.array_equal(found, whole)
    for mine, theirs, rows in ((0, 2, PAGE_SIZE), (1, 3, 3)):
        assert backend.snapshot(mine, rows) == backend.snapshot(theirs, rows)


def test_a_page_in_e4m3_is_half_as_large_and_comes_back_as_it_went(wide: Loaded) -> None:
    backend = wide.backend("triton", "bf16+e4m3kv", 4)
    backend.forward(cut(range(2), 0, PROMPT))
    page = backend.snapshot(0, PAGE_SIZE)
    assert len(page) == wide.facts.page_bytes("bf16+e4m3kv") == wide.facts.page_bytes("bf16") // 2
    backend.landing(3)[:] = page
    backend.scatter([3])
    assert backend.snapshot(3, PAGE_SIZE) == page
    assert backend.snapshot(3, 5) != page


def test_every_precision_has_a_fingerprint_of_its_own_and_plain_ones_keep_their_names(
    wide: Loaded,
) -> None:
    every = [Precision(dtype, kv) for dtype in ("bf16", "fp32", *QUANTISED) for kv in ("auto", "e4m3")]
    marks = {fingerprint(wide.digest, wide.facts, identity(precision, wide.facts)) for precision in every}
    assert len(marks) == len(every)
    assert identity(Precision("bf16"), wide.facts).dtype == "bf16"


@pytest.mark.parametrize(("dtype", "kind", "share"), [("w4a16", Int4, 0.26), ("w8a16", Fp8, 0.52), ("w8a8", Fp8, 0.52)])
def test_projections_are_kept_narrow_and_what_is_said_of_their_size_is_so(
    latent: Loaded, dtype: str, kind: Any, share: float
) -> None:
    weights = latent.weights("bf16", None)
    layer = load_layer(weights, latent.facts, 0, dtype, CPU)
    kinds = {name: type(matrix) for name, matrix in layer.matrices.items()}
    assert kinds == dict.fromkeys(("q_a", "q_b", "kv_a", "o", "gate_up", "down"), kind) | dict.fromkeys(
        ("k_up", "v_up"), Plain
    )
    held = [tensor for matrix in layer.matrices.values() for tensor in vars(matrix).values() if torch.is_tensor(tensor)]
    mine = {name: array for name, array in weights.arrays.items() if name.startswith("0.")}
    total = sum(tensor.nbytes for tensor in [*held, *layer.vectors.values()])
    assert device_bytes(Weights("bf16", mine), Precision(dtype)) == total
    narrow = sum(array.nbytes for name, array in mine.items() if array.ndim == 2 and not name.endswith("kv_b"))
    wide_ones = sum(array.nbytes for array in mine.values()) - narrow
    assert total - wide_ones < share * narrow + 4 * 1024


def test_a_matrix_that_is_packed_a_few_rows_at_a_time_is_packed_as_a_whole(
    wide: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = wide.weights("bf16", None)
    whole = load_layer(weights, wide.facts, 0, "w4a16", CPU).matrices["qkv"]
    monkeypatch.setattr("engine.backends.gpu_weights._TOGETHER", 7 * 128)
    parts = load_layer(weights, wide.facts, 0, "w4a16", CPU).matrices["qkv"]
    assert isinstance(whole, Int4)
    assert isinstance(parts, Int4)
    assert torch.equal(whole.packed, parts.packed)
    assert torch.equal(whole.scale, parts.scale)


@pytest.mark.parametrize(
    ("model", "precision", "said"),
    [
        ("latent", Precision("bf16", "e4m3"), r"latent attention.*set --kv-dtype auto \(TENUTO_KV_DTYPE\)"),
        ("wide", Precision("w4a8", "e4m3"), r"w4a8 runs on the cpu backend.*set --kv-dtype auto \(TENUTO_KV_DTYPE\)"),
    ],
)
def test_kv_in_e4m3_is_refused_where_it_cannot_be(
    request: pytest.FixtureRequest, model: str, precision: Precision, said: str
) -> None:
    with pytest.raises(BackendUnavailable, match=said):
        check_precision(request.getfixturevalue(model).facts, precision)


def test_kv_in_e4m3_is_refused_on_a_gpu_that_does_not_convert_it(wide: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_model, "arch", lambda: "sm_80")
    with pytest.raises(BackendUnavailable, match=r"from sm_89 on, this is sm_80: set --kv-dtype auto \(TENUTO_KV"):
        wide.backend("triton", "bf16+e4m3kv", 4)


@pytest.mark.parametrize(
    ("sizes", "dtype", "said"),
    [
        ({"intermediate_size": 96}, "w4a16", "rows of 96 weights in 0.down, .* of 128: set --dtype w8a16 or bf16"),
        ({"intermediate_size": 100}, "w4a16", "rows of 100 weights in 0.down, .* of 128: set --dtype bf16"),
        ({"intermediate_size": 100}, "w8a16", "rows of 100 weights in 0.down, .* of 16: set --dtype bf16"),
    ],
)
def test_a_model_whose_rows_are_no_whole_groups_is_refused(
    tmp_path: Path, sizes: dict[str, int], dtype: str, said: str
) -> None:
    odd = load(write_hf(tmp_path, "llama", hidden_size=128, **sizes))
    with pytest.raises(BackendUnavailable, match=said + r" \(TENUTO_ENGINE_DTYPE\)"):
        odd.backend("triton", dtype, 4)


def test_an_engine_says_what_its_kv_takes_and_caches_weights_as_bf16(wide: Loaded, tmp_path: Path) -> None:
    settings = EngineSettings(
        wide.path, 64, dtype="w8a16", kv_dtype="e4m3", backend="triton", admission="always", weights_cache=tmp_path
    )
    engine = open_engine(settings, lambda what, done: None)
    engine.close()
    assert (engine.card.backend, engine.card.dtype) == ("triton", "w8a16+e4m3kv")
    assert engine.card.kv_bytes_per_token == wide.facts.kv_bytes_per_token("bf16") // 2
    assert [path.name for path in tmp_path.rglob("weights*")] == ["weights.bf16"]
