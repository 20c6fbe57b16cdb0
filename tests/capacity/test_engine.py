"""What is planned is what the engine allocates: for every family that it runs, and for the models of the catalogue."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from bench.runners import opened_backend
from engine.capacity import formulas as f
from engine.capacity import model_facts, page_bytes
from engine.catalogue import models, resolve
from engine.facts import PAGE_SIZE
from engine.modelfile import open_model
from runtime.settings import Settings
from tests.capacity.support import facts
from tests.engine.tiny_hf import FAMILIES, write_hf


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_page_of_the_engine_has_the_bytes_that_were_planned(family: str, tmp_path: Path) -> None:
    directory = write_hf(tmp_path / family, family)
    with open_model(directory) as model:
        engine = model.facts()
        count = sum(_size(shape) for shape in _shapes(engine).values())
    planned = model_facts(str(directory), tmp_path, io.BytesIO())
    for dtype in ("bf16", "fp32"):
        assert page_bytes(planned.groups, dtype) == engine.page_bytes(dtype)
    _, backend = opened_backend(directory, "fp32", 4, 1, "torch")
    assert page_bytes(planned.groups, "fp32") == len(backend.snapshot(0, PAGE_SIZE))  # of the pool itself
    assert 2 * page_bytes(planned.groups, "fp8") == engine.page_bytes("bf16")
    assert planned.parameters.total == count
    assert f.PAGE_TOKENS == PAGE_SIZE
    assert planned.context == engine.context


@pytest.mark.model
@pytest.mark.parametrize("name", [one.name for one in models()])
def test_a_catalogue_model_is_planned_alike_before_and_after_it_is_pulled(name: str, tmp_path: Path) -> None:
    before = model_facts(name, tmp_path, io.BytesIO())
    pulled = Settings.load({}).models_dir
    path = resolve(name, pulled)
    after = model_facts(name, pulled, io.BytesIO())
    with path.open("rb") as file:
        piped = model_facts("-", tmp_path, io.BytesIO(file.read(16 << 20)))
    with open_model(path) as model:
        engine = model.facts()
    for one in (before, after, piped):
        assert page_bytes(one.groups, "bf16") == engine.page_bytes("bf16")
        assert (one.context, one.vocab, one.layers) == (engine.context, engine.vocab, engine.layers)
    assert after == piped or after.name == piped.name
    assert after.parameters.total - after.parameters.head == before.parameters.total


def test_a_token_of_both_catalogue_models_has_the_bytes_that_the_design_says() -> None:
    found = [f.kv_bytes_per_token(facts(name).groups, "bf16") for name in ("qwen2.5-0.5b", "smollm2-135m")]
    assert found == [12_288, 23_040]


def _shapes(engine: object) -> dict[str, tuple[int, ...]]:
    from engine.modelfile import parts

    return dict(parts(engine))  # type: ignore[arg-type]


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for one in shape:
        total *= one
    return total
