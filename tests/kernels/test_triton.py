"""The Triton backend in the interpreter: the contracts of every backend, and captured steps of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.face import Tile, Wish, cut
from engine.backends.gpu_captured import BUCKETS
from engine.backends.graphs import CaptureFault, Recordings
from engine.facts import PAGE_SIZE
from engine.penalties import Seen
from engine.sampler import sample
from engine.sampling import Sampling
from tests.engine import test_exact, test_moves
from tests.engine.conftest import Loaded, load
from tests.engine.test_exact import PAGES, Rig
from tests.engine.test_moves import THERE, TOKENS
from tests.engine.tiny import write_tiny
from tests.kernels.adopted import adopt

VOCAB = 265

adopt(
    globals(),
    test_exact,
    "test_a_prompt_in_chunks_gives_the_bits_of_the_whole_prompt",
    "test_a_sequence_in_a_mixed_batch_gives_the_bits_it_gives_alone",
    "test_the_rows_of_a_verification_have_the_bits_that_they_have_alone",
    "test_a_restored_session_goes_on_with_the_bits_of_one_that_never_left",
)
adopt(globals(), test_moves)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(write_tiny(tmp_path_factory.mktemp("small") / "tiny.gguf", arch="qwen2"))


@pytest.fixture(scope="module")
def rig(small: Loaded) -> Rig:
    return Rig(small.backend("triton", "bf16", 6 * PAGES), small.facts.vocab)


@pytest.fixture
def tiny(small: Loaded) -> Loaded:
    return small


@pytest.fixture(scope="module")
def made(small: Loaded) -> Any:
    return small.backend("triton", "bf16", 6)


@pytest.fixture
def backend(made: Any) -> Any:
    made.forward(cut(THERE, 0, TOKENS))
    return made


def decode(block: int, row: int, token: int = 5) -> Tile:
    return Tile((block,), row, (token,), True)


def test_gathered_pages_stay_as_they_are_while_others_are_gathered_into_the_same_memory(made: Any) -> None:
    made.forward(cut(THERE, 0, TOKENS))
    first = made.gather([(block, PAGE_SIZE) for block in THERE])
    kept, before = first.pages[1], bytes(first.pages[1])
    del first  # what is left of it is one page
    made.forward(cut(THERE, 0, TOKENS[::-1]))
    second = made.gather([(block, PAGE_SIZE) for block in THERE])
    assert bytes(kept) == before != bytes(second.pages[1])
    del kept
    assert len(made._pages._staging[16]) == 1  # the first one's is free again


@pytest.mark.parametrize("beside", [[], [Tile((3,), 0, (4, 5))]], ids=["captured", "with-a-prefill"])
def test_tokens_drawn_on_the_device_are_those_that_are_drawn_from_its_logits(made: Any, beside: list[Tile]) -> None:
    made.forward([Tile((block,), 0, (7, 8, 9)) for block in (0, 1, 2)])
    tiles = [*(decode(block, 3) for block in (0, 1, 2)), *beside]
    allowed = np.zeros(VOCAB, np.bool_)
    allowed[[5, 77, 200]] = True
    rules = [Sampling(), Sampling(0.9, 40, 0.8, seed=2**64 - 3), Sampling(1.2, seed=5)]
    wishes = [Wish(rule, 31 + row, allowed if row == 2 else None) for row, rule in enumerate(rules)]
    rows = [row for row in made.forward(tiles) if row is not None]
    expected = [sample(row, wish.sampling, wish.position, wish.allowed) for row, wish in zip(rows, wishes, strict=True)]
    assert made.draw(tiles, wishes) == expected
    assert expected[2] in (5, 77, 200)


def test_a_verification_draws_on_the_device_what_is_drawn_from_its_rows_whatever_the_options(made: Any) -> None:
    made.forward(cut([0], 0, [7, 8, 9]))
    made.forward(cut([1], 0, [9, 8, 7]))
    tiles = [*cut([0], 3, [4, 5, 6], all_logits=True), *cut([1], 3, [3])]
    rules = Sampling(
        1.1,
        50,
        0.97,
        seed=8,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((3, 2.5), (9, -100.0)),
    )
    tallies = [Seen([7, 8, 9, 4, 5, 6][: 4 + n], n).tally() for n in range(3)]
    wishes = [Wish(rules, 4 + n, None, tally) for n, tally in enumerate(tallies)] + [Wish(Sampling(), 4)]
    given = [rows.copy() for rows in made.forward(tiles) if rows is not None]
    rows = [*given[0], given[1]]
    expected = [sample(row, w.sampling, w.position, w.allowed, w.tally) for row, w in zip(rows, wishes, strict=True)]
    assert made.draw(tiles, wishes) == expected
    assert all(np.array_equal(row, rows[at]) for at, row in zip((0, 2), made.rows([0, 2]), strict=True))


def test_where_no_token_is_possible_none_is_drawn_and_a_step_without_wishes_draws_nothing(made: Any) -> None:
    made.forward([Tile((0,), 0, (7, 8))])
    nothing = Wish(Sampling(1.0), 2, np.zeros(VOCAB, np.bool_))
    assert made.draw([decode(0, 2)], [nothing]) == [-1]
    assert made.draw([Tile((1,), 0, (7, 8))], []) == []


def test_rows_that_a_bucket_has_too_many_write_nothing_and_change_nothing(made: Any) -> None:
    made.forward([Tile((block,), 0, (7, 8, 9)) for block in (0, 1, 2)])
    three = [decode(block, 3) for block in (0, 1, 2)]
    idle = made.snapshot(4, PAGE_SIZE)
    rows = [row.copy() for row in made.forward(three)]
    assert 3 not in BUCKETS
    assert made.snapshot(4, PAGE_SIZE) == idle
    assert all(np.array_equal(made.forward([tile])[0], row) for tile, row in zip(three, rows, strict=True))
    assert np.array_equal(rows[0], rows[1])


def test_a_bucket_is_captured_once_and_again_only_for_contexts_that_outgrow_it(small: Loaded) -> None:
    fresh = small.backend("triton", "fp32", 8)
    fresh.forward([Tile((0,), 0, (1, 2))])
    assert fresh._captured.captures == 0
    for row in range(2, 5):
        fresh.forward([decode(0, row)])
    assert fresh._captured.captures == 1
    assert fresh.capture(1) is fresh.capture(1)
    assert fresh.capture(1).batch == 1
    fresh.capture(2)
    assert fresh._captured.captures == 2


def test_a_capture_that_failed_is_tried_again(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = small.backend("triton", "fp32", 8)
    fresh.forward([Tile((0,), 0, (1, 2))])
    with monkeypatch.context() as patch:
        patch.setattr(fresh._model, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fresh.forward([decode(0, 2)])
    assert fresh.forward([decode(0, 2)])[0] is not None


def test_a_replay_runs_what_was_recorded_on_the_memory_that_it_was_recorded_with() -> None:
    x, w = torch.ones(2, 3), torch.full((3,), 2.0)
    graph = Recordings().record(lambda: ((x * w).view(6) + 1).sum(0, keepdim=True))
    first = graph.result
    assert first.item() == 18
    x[0, 0] = 11
    graph.replay()
    assert graph.result is first
    assert first.item() == 38


def test_a_number_of_python_that_changes_later_does_not_change_a_replay() -> None:
    x, factor = torch.ones(1), [2.0]
    graph = Recordings().record(lambda: x * factor[0])
    factor[0] = 99.0
    graph.replay()
    assert graph.result.item() == 2.0


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * x.sum().item(),
        lambda x: x + torch.tensor([1.0]),
        lambda x: x[x > 0],
        lambda x: x.unique(),
    ],
    ids=["item", "host-memory", "mask", "unique"],
)
def test_a_step_that_waits_for_the_device_or_reads_host_memory_cannot_be_captured(work: Any) -> None:
    with pytest.raises(CaptureFault, match="waits for the device or reads host memory"):
        Recordings().record(lambda: work(torch.ones(3)))
