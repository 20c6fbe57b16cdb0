"""Every family end to end through the Triton backend, against what transformers makes of the same directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends import gpu_model
from engine.backends.face import cut
from tests.engine.conftest import load
from tests.engine.test_huggingface import FP32_BOUND, PROMPT, theirs
from tests.engine.tiny_hf import FAMILIES, WINDOW, write_hf

SHORT = PROMPT[:40]
ENDS = (17, 38, 39, 40)  # prefill to here and there, and single tokens
assert len(SHORT) > WINDOW


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_hf(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def logits(directory: Path, dtype: str) -> Any:
    """After each of ENDS: [ends, vocab]."""
    backend, rows, start = load(directory).backend("triton", dtype, 4), [], 0
    for end in ENDS:
        rows.append(backend.forward(cut(range(4), start, SHORT[start:end]))[-1].copy())
        start = end
    return np.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(directories: dict[str, Path], family: str) -> None:
    wanted = theirs(directories[family], torch.float32)[[end - 1 for end in ENDS]]
    assert np.abs(wanted).max() > 3
    assert np.abs(logits(directories[family], "fp32") - wanted).max() < FP32_BOUND


def test_latent_attention_a_few_rows_at_a_time_gives_the_bits_of_all_at_once(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = logits(directories["deepseek_v3"], "bf16")
    monkeypatch.setattr(gpu_model, "_MOST_PARTIALS", 3 * 4 * 33)  # three rows of four heads
    assert np.array_equal(logits(directories["deepseek_v3"], "bf16"), whole)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_bf16_are_as_near_to_those_in_fp32_as_transformers_own(
    directories: dict[str, Path], family: str
) -> None:
    at = [end - 1 for end in ENDS]
    exact, rounded = (theirs(directories[family], dtype)[at] for dtype in (torch.float32, torch.bfloat16))
    found = logits(directories[family], "bf16")
    assert np.square(found - exact).mean() < 1.5 * np.square(rounded - exact).mean()
