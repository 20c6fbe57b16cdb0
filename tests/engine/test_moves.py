"""The contract of `MovesPages`, over every backend."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from engine.backends.face import cut
from engine.errors import ArrivalFailed
from engine.facts import PAGE_SIZE
from tests.engine.conftest import Loaded

TOKENS = [(7 * at + 3) % 250 for at in range(3 * PAGE_SIZE)]
THERE, BACK = [0, 1, 2], [5, 3, 4]


@pytest.fixture(params=["cpu", "torch"])
def backend(request: pytest.FixtureRequest, tiny: Loaded) -> Any:
    made = tiny.backend(request.param, "bf16", 6)
    made.forward(cut(THERE, 0, TOKENS))
    return made


def bits(backend: Any, blocks: list[int]) -> list[bytes]:
    return [backend.snapshot(block, PAGE_SIZE) for block in blocks]


def test_gathered_pages_are_those_of_the_steps_so_far_whatever_becomes_of_their_blocks(backend: Any) -> None:
    expected = [*bits(backend, THERE[:2]), backend.snapshot(2, 5)]
    copied = backend.gather([(0, PAGE_SIZE), (1, PAGE_SIZE), (2, 5)])
    for block in THERE:
        backend.zero(block)
    copied.ready.wait()
    assert copied.ready.done()
    assert copied.pages == expected
    assert len(set(expected)) == 3


@pytest.mark.parametrize("stripes", [[None], [range(1), range(1, 2)]])
def test_pages_that_were_scattered_are_those_that_were_gathered_and_the_next_step_reads_them(
    backend: Any, tiny: Loaded, stripes: list[range | None]
) -> None:
    assert tiny.facts.layers == 2
    copied = backend.gather([(block, PAGE_SIZE) for block in THERE])
    copied.ready.wait()
    for block, page in zip(BACK, copied.pages, strict=True):
        backend.landing(block)[:] = page
    moves = [backend.scatter(BACK, layers) for layers in stripes]
    stayed, restored = (
        backend.forward(cut([*blocks], len(TOKENS) - 1, TOKENS[-1:]))[0].copy() for blocks in (THERE, BACK)
    )
    assert np.array_equal(stayed, restored)
    for move in moves:
        move.wait()
        assert move.done()
    assert bits(backend, BACK) == bits(backend, THERE)


@pytest.mark.parametrize("comes", [True, False])
def test_a_step_reads_layers_once_they_have_come_and_ends_if_they_do_not(backend: Any, comes: bool) -> None:
    expected = backend.forward(cut([0, 1, 2], 40, TOKENS[40:]))[-1].copy()
    copied = backend.gather([(0, PAGE_SIZE), (1, PAGE_SIZE)])
    copied.ready.wait()
    arrival = backend.expect([3, 4])
    half = len(copied.pages[0]) // 2
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(backend.forward, cut([3, 4, 2], 40, TOKENS[40:]), arrival)
        for layers, part in ((1, slice(0, half)), (2, slice(half, None))):
            assert not step.done()
            if not comes and layers == 2:
                arrival.fail()
                break
            for block, page in zip((3, 4), copied.pages, strict=True):
                backend.landing(block)[part] = page[part]
            arrival.land(layers)
        if comes:
            assert np.array_equal(step.result()[-1], expected)
            arrival.fail()  # too late to matter
            assert np.array_equal(backend.forward(cut([3, 4, 2], 40, TOKENS[40:]), arrival)[-1], expected)
        else:
            with pytest.raises(ArrivalFailed):
                step.result()
    assert np.array_equal(backend.forward(cut([0, 1, 2], 40, TOKENS[40:]))[-1], expected)


def test_a_landing_is_a_page_of_memory_that_can_be_written(backend: Any, tiny: Loaded) -> None:
    landing = backend.landing(3)
    assert (landing.nbytes, landing.itemsize, landing.readonly) == (tiny.facts.page_bytes("bf16"), 1, False)
    assert landing.c_contiguous


def test_the_first_landing_begins_where_a_disk_can_write_by_itself(backend: Any) -> None:
    assert ctypes.addressof(ctypes.c_char.from_buffer(backend.landing(0))) % 4096 == 0
