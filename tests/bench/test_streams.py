from __future__ import annotations

import pytest

from bench.compiled import BenchError
from bench.engine_figures import figures
from bench.streams import Stream, measure
from tests.bench.support import MATRIX_BYTES
from tests.engine.conftest import model_path, native_library


def test_gaps_are_those_that_end_in_the_window():
    stream = Stream([1.0, 1.1, 1.3, 1.6, 2.0])
    assert stream.gaps_ms(1.2, 1.7) == [200.0, 300.0]


def test_the_wait_between_two_generations_is_no_gap():
    stream = Stream([1.0, 1.1, 1.9, 2.0], breaks={0, 2})
    assert stream.gaps_ms(0.0, 3.0) == [100.0, 100.0]


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.asyncio
async def test_a_prompt_beside_eight_streams_is_measured_and_a_stopped_engine_shows():
    native_library()
    model = model_path("smollm2-135m-instruct")
    lines = await measure(model, "bf16", threads=2, repeats=1, prompt=384, stalled=True)
    assert [line["window"] for line in lines] == ["calm", "beside"]
    assert all(line["gaps_ms"] for line in lines)
    assert max(lines[1]["gaps_ms"]) > 250
    about = {"kind": "about", "peer": "llama.cpp", "quick": True, "matrix_bytes": MATRIX_BYTES}
    assert figures([about, *lines])["itl_p95_ratio"] > 0


@pytest.mark.model
@pytest.mark.asyncio
async def test_a_mode_that_the_engine_does_not_have_is_named():
    model = model_path("smollm2-135m-instruct")
    with pytest.raises(BenchError, match="does not start in no_such_mode"):
        await measure(model, "no_such_mode", threads=2, repeats=1)
