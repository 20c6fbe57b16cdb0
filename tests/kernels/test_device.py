"""What keeps a model off a GPU is said in a sentence that names what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.backends import gpu_device
from engine.errors import RequestError
from tests.engine.process import refusal
from tests.engine.tiny import write_tiny

GB = 10**9


def test_a_pytorch_for_cpus_is_named_and_nothing_is_asked_of_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "built for CPUs only" in str(gpu_device.why_not())


def test_a_driver_that_shows_no_device_is_told_from_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "nvidia-smi" in str(gpu_device.why_not())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def fails() -> tuple[int, int]:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "get_device_capability", fails)
    assert str(gpu_device.why_not()).endswith("is too old (found version 11040).")


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)])
def test_a_device_is_asked_for_the_capability_that_bf16_needs(capability: tuple[int, int], fits: bool) -> None:
    said = gpu_device.too_old("Tesla T4", capability)
    assert (said is None) == fits
    assert fits or "Tesla T4 has compute capability 7.5; 8.0 (A100 and later)" in str(said)


def test_a_pool_that_does_not_fit_is_refused_with_the_tokens_that_would() -> None:
    page = 2 << 20
    gpu_device.must_fit(80 * GB, 40 * GB, 16 * GB, page)
    with pytest.raises(
        RequestError, match=r"KV pool 70.0: lower --kv-tokens \(TENUTO_KV_TOKENS\): \d+ would fit"
    ) as no:
        gpu_device.must_fit(80 * GB, 70 * GB, 16 * GB, page)
    tokens = int(str(no.value).split("TENUTO_KV_TOKENS): ")[1].split()[0])
    gpu_device.must_fit(80 * GB, tokens // 16 * page, 16 * GB, page)
    with pytest.raises(RequestError, match="take a smaller model"):
        gpu_device.must_fit(80 * GB, 1, 90 * GB, page)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_an_engine_that_is_to_run_on_a_gpu_says_why_there_is_none_before_it_reads_a_weight(
    tmp_path: Path,
) -> None:
    status, told = await refusal(write_tiny(tmp_path / "tiny.gguf"), tmp_path, backend="triton")
    assert (status, told[-1]["kind"]) == (2, "BackendUnavailable")
    assert "the triton backend needs a GPU" in told[-1]["error"]
    assert not any(line.get("what") == "weights" for line in told)
