"""The Triton backend in the interpreter: the same contracts as every backend's, and captured steps of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.face import Tile, cut
from engine.backends.gpu_captured import CapturedSteps
from engine.backends.graphs import CaptureFault, Recordings
from engine.facts import PAGE_SIZE
from tests.engine.conftest import Loaded, load
from tests.engine.test_exact import (
    LENGTH,
    PAGES,
    Rig,
    test_a_prompt_in_chunks_gives_the_bits_of_the_whole_prompt,
    test_a_prompt_in_odd_chunks_beside_a_decode_leaves_the_bits_of_both,
    test_a_restored_session_goes_on_with_the_bits_of_one_that_never_left,
    test_a_sequence_in_a_mixed_batch_gives_the_bits_it_gives_alone,
    test_copied_rows_are_a_page_of_ones_own,
    test_decode_steps_of_any_batch_have_the_bits_of_steps_with_a_prefill_in_them,
    test_what_a_block_held_before_does_not_matter,
)
from tests.engine.test_moves import (
    BACK,
    THERE,
    TOKENS,
    test_a_landing_is_a_page_of_memory_that_can_be_written,
    test_a_step_reads_layers_once_they_have_come_and_ends_if_they_do_not,
    test_gathered_pages_are_those_of_the_steps_so_far_whatever_becomes_of_their_blocks,
    test_pages_that_were_scattered_are_those_that_were_gathered_and_the_next_step_reads_them,
    test_the_first_landing_begins_where_a_disk_can_write_by_itself,
)
from tests.engine.tiny import write_tiny

__all__ = [name for name in globals() if name.startswith("test_")]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(write_tiny(tmp_path_factory.mktemp("small") / "tiny.gguf", arch="qwen2"))


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def rig(request: pytest.FixtureRequest, small: Loaded) -> Rig:
    return Rig(small.backend("triton", request.param, 6 * PAGES), small.facts.vocab)


@pytest.fixture
def tiny(small: Loaded) -> Loaded:
    return small


@pytest.fixture
def backend(small: Loaded) -> Any:
    made = small.backend("triton", "bf16", 6)
    made.forward(cut(THERE, 0, TOKENS))
    return made
