"""Models in Hugging Face directories, against what transformers makes of the same directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.face import cut
from tests.engine.conftest import Loaded, load
from tests.engine.tiny_hf import FAMILIES, VOCAB, read_hf, write_hf

PROMPT = [int(i) for i in np.random.default_rng(5).integers(0, VOCAB, 75)]
LATENT = ("deepseek_v2", "deepseek_v3")
FP32_BOUND = 1e-4  # of a logit: fp32 products in another order
BACKENDS = [("torch", family) for family in FAMILIES] + [("cpu", family) for family in FAMILIES if family not in LATENT]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_hf(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def logits(loaded: Loaded, backend: str, dtype: str) -> Any:
    """Of every position of the prompt: [tokens, vocab]."""
    engine = loaded.backend(backend, dtype, 8)
    rows = [engine.forward(cut(range(8), at, [token]))[-1].copy() for at, token in enumerate(PROMPT)]
    return np.stack(rows)


def theirs(directory: Path, dtype: torch.dtype) -> Any:
    with torch.inference_mode():
        return read_hf(directory, dtype)(torch.tensor([PROMPT])).logits[0].float().numpy()


@pytest.mark.parametrize(("backend", "family"), BACKENDS)
def test_logits_are_those_of_transformers(directories: dict[str, Path], backend: str, family: str) -> None:
    wanted = theirs(directories[family], torch.float32)
    assert np.abs(wanted).max() > 3
    assert np.abs(logits(load(directories[family]), backend, "fp32") - wanted).max() < FP32_BOUND


@pytest.mark.parametrize(("backend", "family"), BACKENDS)
def test_logits_in_bf16_are_as_near_to_those_in_fp32_as_transformers_own(
    directories: dict[str, Path], backend: str, family: str
) -> None:
    exact, rounded = (theirs(directories[family], dtype) for dtype in (torch.float32, torch.bfloat16))
    found = logits(load(directories[family]), backend, "bf16")
    assert np.square(found - exact).mean() < 1.5 * np.square(rounded - exact).mean()
