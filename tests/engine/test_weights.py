"""Dequantised weights and what names a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.facts import BackendIdentity, Mla, RopeScaling, fingerprint
from engine.modelfile import open_model
from engine.weights import load_weights
from tests.engine.conftest import Loaded, load
from tests.engine.tiny import write_tiny

IDENTITY = BackendIdentity("torch", "exact", "bf16", "layer.kv.head.16.d", "x86_64/AVX512", 2, "2.13")


def cache_file(cache: Path) -> Path:
    (path,) = cache.rglob("weights.*")
    return path


def test_cached_weights_equal_those_built_in_memory(tiny: Loaded, tmp_path: Path) -> None:
    for dtype in ("bf16", "fp32", "w4a8"):
        fresh = tiny.weights(dtype, None)
        cached = tiny.weights(dtype, tmp_path)
        assert fresh.arrays.keys() == cached.arrays.keys()
        assert all(np.array_equal(fresh.arrays[name], cached.arrays[name]) for name in fresh.arrays)


def test_a_second_start_maps_the_cache_instead_of_building_it(tiny: Loaded, tmp_path: Path) -> None:
    tiny.weights("bf16", tmp_path)
    before = cache_file(tmp_path).stat().st_mtime_ns
    tiny.weights("bf16", tmp_path)
    assert cache_file(tmp_path).stat().st_mtime_ns == before


def test_a_torn_cache_is_built_again(tiny: Loaded, tmp_path: Path) -> None:
    fresh = tiny.weights("bf16", tmp_path)
    path = cache_file(tmp_path)
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[:100], b"", b"x" + whole[1:], whole[:20] + b"?" + whole[21:]):
        path.unlink()
        path.write_bytes(torn)
        again = tiny.weights("bf16", tmp_path)
        assert all(np.array_equal(fresh.arrays[name], again.arrays[name]) for name in fresh.arrays)
        assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_done_without(tiny: Loaded, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert tiny.weights("bf16", blocked).arrays.keys() == tiny.weights("bf16", None).arrays.keys()


def test_bf16_rounds_to_nearest_even() -> None:
    import torch

    from engine.weights import _to_dtype

    values = np.concatenate([np.random.default_rng(0).standard_normal(4096), [0.0, -0.0, 1e30]]).astype(np.float32)
    wanted = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(_to_dtype(values, "bf16"), wanted)


def test_loading_reports_progress_to_the_end(tiny: Loaded, tmp_path: Path) -> None:
    told: list[float] = []
    with open_model(tiny.path) as model:
        load_weights(model, tiny.digest, tiny.facts, "bf16", tmp_path, told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_other_weights_under_the_same_name_have_another_fingerprint(tmp_path: Path) -> None:
    first = load(write_tiny(tmp_path / "a" / "m.gguf" if (tmp_path / "a").mkdir() is None else tmp_path, seed=1))
    second = load(write_tiny(tmp_path / "b" / "m.gguf" if (tmp_path / "b").mkdir() is None else tmp_path, seed=2))
    assert first.facts == second.facts
    assert fingerprint(first.digest, first.facts, IDENTITY) != fingerprint(second.digest, second.facts, IDENTITY)


def test_anything_that_can_change_a_bit_changes_the_fingerprint(tiny: Loaded) -> None:
    mark = fingerprint(tiny.digest, tiny.facts, IDENTITY)
    changes = {
        "dtype": "fp32",
        "threads": 1,
        "instruction_set": "arm64",
        "mode": "batched",
        "page_layout": "p",
        "version": "3",
    }
    others = {
        fingerprint(tiny.digest, tiny.facts, replace(IDENTITY, **{name: value})) for name, value in changes.items()
    }
    assert len(others | {mark}) == len(changes) + 1
    with open_model(tiny.path) as model:
        assert fingerprint(tiny.digest, model.facts(), IDENTITY) == mark


def test_a_model_of_the_first_release_has_the_fingerprint_that_it_had_then(tiny: Loaded) -> None:
    facts = replace(tiny.facts, name="tiny", size_bytes=1)
    then = "0f8778b7c0c796cc105731434989636c1e316d1259357e126a93b81d9205ba81"
    assert fingerprint("0" * 64, facts, IDENTITY).hex() == then


def test_what_only_some_models_have_changes_the_fingerprint(tiny: Loaded) -> None:
    scaling = RopeScaling("llama3", factor=8.0, original_context=8192, low=1.0, high=4.0)
    others = [{"qk_norm": True}, {"windows": (24, 0)}, {"mla": Mla(None, 32, 16, 16, 16)}, {"rope_scaling": scaling}]
    marks = {fingerprint(tiny.digest, replace(tiny.facts, **other), IDENTITY) for other in [{}, *others]}
    assert len(marks) == 1 + len(others)


def test_groups_of_another_version_are_made_again(
    tiny: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.weights("w4a8", tmp_path)
    before = cache_file(tmp_path).read_bytes()
    monkeypatch.setattr("engine.weights.VERSION", 99)
    tiny.weights("w4a8", tmp_path)
    assert cache_file(tmp_path).read_bytes() != before
