"""What a CPU shows of the GPU's formats: weights as they are unpacked, pages as e4m3 holds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.compiled import BenchError
from bench.eval_run import FORMATS, Mode
from engine.backends.face import cut
from engine.backends.torch_layers import as_tensor
from engine.precision import Precision
from tests.engine.conftest import cpu_backend, load
from tests.engine.tiny_hf import write_hf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("eval") / "m", "qwen3", hidden_size=128, intermediate_size=128)


def test_weights_have_no_more_values_than_the_format_has(model: Path) -> None:
    from bench.eval_formats import opened_format

    _, weights = opened_format(model, Precision("w4a16"))
    plain = load(model).weights("bf16", None)
    row = as_tensor(weights.arrays["0.o"])[5]
    assert len(row.unique()) <= 16 < len(as_tensor(plain.arrays["0.o"])[5].unique())
    assert all(np.array_equal(weights.arrays[name], plain.arrays[name]) for name in ("embed", "norm", "1.attn_norm"))


def test_pages_hold_what_e4m3_can_say_and_the_order_of_tiles_stays(model: Path) -> None:
    from bench.eval_formats import E4m3Pages

    loaded = load(model)
    backends = [cpu_backend(loaded.facts, loaded.weights("bf16", None), 4) for _ in range(2)]
    tiles = [*cut((0, 1), 0, range(20, 40)), *cut((2,), 0, range(40, 45))]
    found, plain = E4m3Pages(backends[0]).forward(tiles), backends[1].forward(tiles)
    assert [row is None for row in found] == [True, False, False]
    assert np.array_equal(found[2], plain[2])  # alone in its page: it saw what was not rounded yet
    assert not np.array_equal(found[1], plain[1])
    page = torch.frombuffer(backends[0].page(0), dtype=torch.bfloat16)
    assert page.abs().max() > 0
    assert torch.equal(page, page.to(torch.float8_e4m3fn).bfloat16())


def test_a_format_that_the_model_does_not_have_is_absent_with_its_reason(tmp_path: Path) -> None:
    odd = write_hf(tmp_path / "m", "qwen3", hidden_size=128, intermediate_size=96)
    assert "w4a16" in FORMATS
    with pytest.raises(BenchError, match="takes whole groups of 128"):
        Mode(odd, "w4a16", threads=1)
