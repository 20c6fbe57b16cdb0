"""Which backend is chosen, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.backends import choose as choosing
from engine.backends.choose import BackendSettings, open_backend
from engine.errors import BackendUnavailable
from engine.native import Library
from engine.precision import Precision
from tests.engine.conftest import NATIVE, Loaded


def choose(
    tiny: Loaded, name: str, cache_dir: Path | None = NATIVE.parent, dtype: str = "bf16"
) -> tuple[Any, list[str]]:
    told: list[str] = []
    settings = BackendSettings(name, 4, 2, cache_dir)
    backend = open_backend(settings, tiny.facts, tiny.weights(dtype, None), lambda what, done: told.append(what))
    return backend.identity.backend, told


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(("asked", "given"), [("auto", "cpu"), ("cpu", "cpu"), ("torch", "torch")])
def test_the_backend_is_the_one_asked_for_and_auto_takes_the_fastest(tiny: Loaded, asked: str, given: str) -> None:
    assert choose(tiny, asked)[0] == given


@pytest.mark.usefixtures("no_compiler")
def test_auto_goes_on_with_torch_where_nothing_can_be_built_and_says_why(tiny: Loaded) -> None:
    name, told = choose(tiny, "auto")
    assert name == "torch"
    assert "there is no g++ on this machine" in " ".join(told)


@pytest.mark.usefixtures("no_compiler")
def test_auto_does_not_go_on_with_a_backend_that_cannot_run_the_dtype(tiny: Loaded) -> None:
    with pytest.raises(BackendUnavailable, match=r"the cpu backend cannot run here: there is no g\+\+"):
        choose(tiny, "auto", dtype="w4a8")


@pytest.mark.usefixtures("no_compiler")
def test_a_backend_asked_for_by_name_is_never_replaced(tiny: Loaded) -> None:
    with pytest.raises(BackendUnavailable, match=r"the cpu backend cannot run here: there is no g\+\+"):
        choose(tiny, "cpu")


def test_auto_takes_torch_on_a_processor_without_vectors_for_it(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "best_instruction_set", "plain")
    name, told = choose(tiny, "auto")
    assert name == "torch"
    assert "neither AVX-512 nor AVX2" in " ".join(told)
    assert choose(tiny, "cpu")[0] == "cpu"
    assert choose(tiny, "auto", dtype="w4a8")[0] == "cpu"


def test_an_unknown_backend_is_refused_by_name(tiny: Loaded) -> None:
    with pytest.raises(BackendUnavailable, match="there are auto, triton, cpu, torch"):
        choose(tiny, "tpu")


@pytest.mark.parametrize(
    ("name", "precision", "said"),
    [
        (
            "cpu",
            Precision("w4a16"),
            r"--dtype w4a16 \(TENUTO_ENGINE_DTYPE\) needs the triton backend, and cpu was",
        ),
        (
            "torch",
            Precision("fp32", "e4m3"),
            r"--kv-dtype e4m3 \(TENUTO_KV_DTYPE\) needs the triton backend, and tor",
        ),
        (
            "auto",
            Precision("w8a8", "e4m3"),
            r"w8a8 .* and --kv-dtype e4m3 .* needs a GPU, and PyTorch sees none: set",
        ),
    ],
)
def test_a_precision_that_only_a_gpu_has_is_refused_elsewhere_by_its_setting(
    tiny: Loaded, name: str, precision: Precision, said: str
) -> None:
    settings = BackendSettings(name, 4, 2, None, precision)
    with pytest.raises(BackendUnavailable, match=said):
        open_backend(settings, tiny.facts, tiny.weights(precision.loaded, None), lambda what, done: None)


def test_auto_does_not_go_on_in_another_precision_where_the_gpu_cannot_be_used(
    tiny: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_old(*_: Any) -> Any:
        raise BackendUnavailable("the GPU is too old")

    monkeypatch.setattr(choosing, "has_gpu", lambda: True)
    monkeypatch.setattr(choosing, "_triton", too_old)
    settings = BackendSettings("auto", 4, 2, NATIVE.parent, Precision("bf16", "e4m3"))
    with pytest.raises(BackendUnavailable, match="the GPU is too old"):
        open_backend(settings, tiny.facts, tiny.weights("bf16", None), lambda what, done: None)
