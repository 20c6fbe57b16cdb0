"""Every engine of the bench runs the same model: the same weights, positions and sequences."""

from __future__ import annotations

import numpy as np
import pytest

from bench import formats, llamacpp
from bench.columns import text
from bench.compiled import BenchError
from bench.runners import Sizes, open_runner
from engine.backends.face import cut
from tests.engine.conftest import model_path, native_library, share_native
from tests.engine.tiny import write_tiny

SIZES = Sizes(context=256, sequences=2, batch=512, threads=2)
CLOSE = 0.05  # of the logits' own spread; bf16 weights and KV, f16 KV in llama.cpp


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    native_library()
    directory = tmp_path_factory.mktemp("runners")
    share_native(directory)
    return write_tiny(directory / "tiny.gguf")


def outline(runner):
    """Logits after a prompt, after one more token of it, and after its sibling in the same step."""
    first, second = text(0, 41), text(1, 41)
    runner.step([(0, 0, first[:40])])
    whole = runner.step([(1, 0, second[:40])])
    both = runner.step([(0, 40, first[40:]), (1, 40, second[40:])])
    runner.cut(1, 40)
    again = runner.step([(1, 40, second[40:])])
    return whole[0], both, again[0]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).max() < CLOSE * other.std() * 4


def test_ours_starts_again_where_a_sequence_was_cut(tiny):
    whole, both, again = outline(open_runner("ours/fp32", tiny, None, SIZES, {}))
    assert both.shape == (2, len(whole))
    assert np.array_equal(both[1], again)
    assert not np.array_equal(both[0], both[1])


def test_a_slowed_runner_runs_every_step_more_than_once(tiny, monkeypatch):
    runner = open_runner("ours/fp32", tiny, None, SIZES, {"slowed": 3})
    forward, calls = runner._backend.forward, []
    monkeypatch.setattr(runner._backend, "forward", lambda tiles: calls.append(tiles) or forward(tiles))
    runner.step([(0, 0, text(0, 8))])
    assert len(calls) == 3


def test_a_mode_that_the_engine_does_not_have_is_named(tiny):
    with pytest.raises(BenchError, match="no_such_mode"):
        open_runner("ours/no_such_mode", tiny, None, SIZES, {})


@pytest.mark.parametrize(("position", "length", "rows"), [(0, 40, [16, 16, 8]), (5, 3, [3]), (14, 20, [2, 16, 2])])
def test_tiles_are_cut_at_page_boundaries_and_the_last_wants_logits(position, length, rows):
    tiles = cut(range(8), position, list(range(length)))
    assert [len(tile.tokens) for tile in tiles] == rows
    assert [token for tile in tiles for token in tile.tokens] == list(range(length))
    assert [tile.wants_logits for tile in tiles] == [False] * (len(rows) - 1) + [True]
    assert tiles[0].row == position % 16


@pytest.mark.model
def test_transformers_runs_the_same_model():
    model = model_path("smollm2-135m-instruct")
    native_library()
    ours = open_runner("ours/bf16", model, None, SIZES, {})
    theirs = open_runner("transformers/bf16", model, None, SIZES, {})
    first = text(0, 40)
    assert_close(theirs.step([(0, 0, first)]), ours.step([(0, 0, first)]))
    theirs.cut(0, 30)
    assert_close(theirs.step([(0, 30, first[30:35])]), ours.step([(0, 30, first[30:35])]))


@pytest.mark.model
def test_llama_cpp_runs_the_same_model_with_everything_that_this_machine_has():
    found = llamacpp.built()
    if found is None:
        pytest.skip("llama.cpp is not built here; python -m bench.engine builds it")
    model = model_path("smollm2-135m-instruct")
    native_library()
    file = formats.files(found, model, lambda text: None)["bf16"]
    theirs = open_runner("llama.cpp/bf16", model, file, SIZES, {})
    ours = open_runner("ours/bf16", model, None, SIZES, {})
    for one, other in zip(outline(theirs), outline(ours), strict=True):
        assert_close(np.atleast_2d(one), np.atleast_2d(other))
    assert llamacpp.refusals(theirs.about) == []


@pytest.mark.model
def test_llama_cpp_without_flash_attention_is_refused():
    found = llamacpp.built()
    if found is None:
        pytest.skip("llama.cpp is not built here; python -m bench.engine builds it")
    model = model_path("smollm2-135m-instruct")
    theirs = open_runner("llama.cpp/as-it-is", model, model, SIZES, {"flash_off": True})
    assert llamacpp.refusals(theirs.about) == ["flash attention is disabled in llama.cpp"]
