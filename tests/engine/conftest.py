"""Models and engines for the tests of the engine."""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the engine process does; before torch is loaded

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import BackendUnavailable
from engine.facts import ModelFacts
from engine.modelfile import open_model
from engine.precision import Precision
from tests.engine.fakes import Harness
from tests.engine.tiny import write_tiny

MODELS = ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct")


def models_dir() -> Path:
    return Path(os.environ.get("TENUTO_MODELS", Path.home() / ".cache" / "tenuto" / "models"))


def model_path(name: str) -> Path:
    path = models_dir() / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{name} is not on this machine")
    return path


NATIVE = models_dir() / "cache" / "native"  # one build for all tests


def share_native(directory: Path) -> None:
    """Let an engine whose model is in `directory` find the build that the tests share."""
    NATIVE.mkdir(parents=True, exist_ok=True)
    (directory / "cache").mkdir()
    (directory / "cache" / "native").symlink_to(NATIVE)


@dataclass(frozen=True)
class Loaded:
    """A model file, opened for a backend."""

    path: Path
    facts: ModelFacts
    digest: str

    def weights(self, dtype: str, cache: Path | None) -> Any:
        from engine.weights import load_weights

        with open_model(self.path) as model:
            return load_weights(model, self.digest, self.facts, dtype, cache, lambda done: None)

    def backend(
        self, name: str, dtype: str, pool_blocks: int, cache: Path | None = None, isa: str | None = None
    ) -> Any:
        """`dtype`: the name of a precision. `isa` is for cpu: the instruction set instead of the best one."""
        precision = Precision(*dtype.split("+")[:1], kv="e4m3" if "+e4m3kv" in dtype else "auto")
        weights = self.weights(precision.loaded, cache)
        if name == "cpu":
            return cpu_backend(self.facts, weights, pool_blocks, isa)
        if name == "triton":
            from engine.backends.triton import Triton

            return Triton(self.facts, weights, pool_blocks=pool_blocks, precision=precision)
        from engine.backends.torch_exact import TorchExact

        return TorchExact(self.facts, weights, pool_blocks=pool_blocks, threads=2)


def cpu_backend(facts: ModelFacts, weights: Any, pool_blocks: int, isa: str | None = None) -> Any:
    from engine.backends.cpu import Cpu

    return Cpu(facts, weights, library=native_library(), pool_blocks=pool_blocks, threads=2, isa=isa)


def native_library() -> Any:
    """The library that the tests share; skips where there is no compiler."""
    from engine.native import Library, build

    try:
        return Library(build(NATIVE, lambda done: None))
    except BackendUnavailable as reason:
        pytest.skip(str(reason))


def load(path: Path) -> Loaded:
    with open_model(path) as model:
        return Loaded(path, model.facts(), model.digest())


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    share_native(directory)
    return write_tiny(directory / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Loaded:
    return load(tiny_path)


@pytest.fixture
def talkative(tmp_path: Path) -> Path:
    """A tiny model with a long context that never says its last word: the logit of token 2 is zero, others are not."""
    rows = np.random.default_rng(0).standard_normal((265, 64)).astype(np.float32)
    rows[2] = 0
    share_native(tmp_path)
    return write_tiny(tmp_path / "long.gguf", llama__context_length=65_536, tensors={"token_embd.weight": rows})


@pytest.fixture(params=MODELS)
def real_path(request: pytest.FixtureRequest) -> Path:
    return model_path(request.param)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path) as engine:
        yield engine
