"""The C++ decoder: instruction sets, shapes, threads, and its pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends import Tile
from engine.errors import BackendUnavailable
from engine.facts import PAGE_SIZE, ModelFacts
from engine.native import INSTRUCTION_SETS
from engine.weights import Weights
from tests.engine.conftest import MODELS, Loaded, cpu_backend, load, model_path, models_dir, native_library

CLOSE = {"fp32": 1e-5, "bf16": 4e-2}  # of the greatest logit


def random_model(**changes: Any) -> tuple[ModelFacts, dict[str, np.ndarray[Any, np.dtype[Any]]]]:
    """A decoder of any shape with random fp32 weights."""
    sizes: dict[str, Any] = {
        "layers": 2,
        "hidden": 128,
        "ffn": 80,
        "heads": 2,
        "kv_heads": 1,
        "head_size": 64,
        **changes,
    }
    facts = ModelFacts(
        name="random",
        arch="llama",
        context=512,
        vocab=75,
        rope_base=10_000.0,
        rope_scale=1.0,
        norm_eps=1e-5,
        tied_output=False,
        qkv_bias=True,
        size_bytes=0,
        **sizes,
    )
    rng = np.random.default_rng(5)
    wide, qkv = facts.hidden, (facts.heads + 2 * facts.kv_heads) * facts.head_size

    def matrix(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    arrays = {"embed": matrix(facts.vocab, wide), "head": matrix(facts.vocab, wide), "norm": np.ones(wide, np.float32)}
    for layer in range(facts.layers):
        shapes = {
            "attn_norm": (wide,),
            "ffn_norm": (wide,),
            "qkv": (qkv, wide),
            "qkv_bias": (qkv,),
            "o": (wide, wide),
            "gate_up": (2 * facts.ffn, wide),
            "down": (wide, facts.ffn),
        }
        arrays |= {f"{layer}.{name}": matrix(*shape) for name, shape in shapes.items()}
    return facts, arrays


def prompt(tokens: list[int]) -> list[Tile]:
    starts = range(0, len(tokens), PAGE_SIZE)
    return [
        Tile(tuple(range(n + 1)), 0, tuple(tokens[at : at + PAGE_SIZE]), at + PAGE_SIZE >= len(tokens))
        for n, at in enumerate(starts)
    ]


def ids(count: int, vocab: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(1).integers(0, vocab, count)]


def distance(left: Any, right: Any) -> float:
    return float(np.abs(left - right).max() / np.abs(right).max())


def runnable() -> tuple[str, ...]:
    """The instruction sets of this machine."""
    best = native_library().best_instruction_set
    return INSTRUCTION_SETS[: INSTRUCTION_SETS.index(best) + 1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_instruction_sets_agree_closely(tiny: Loaded, dtype: str) -> None:
    tiles = prompt(ids(150, tiny.facts.vocab))
    reference = tiny.backend("torch", dtype, 16).forward(tiles)[-1]
    for isa in runnable():
        backend = tiny.backend("cpu", dtype, 16, isa=isa)
        assert backend.identity.instruction_set.endswith(isa)
        assert distance(backend.forward(tiles)[-1], reference) < CLOSE[dtype]


@pytest.mark.model
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_every_instruction_set_gives_the_tokens_of_torch_on_a_real_model(isa: str) -> None:
    if isa not in runnable():
        pytest.skip(f"this processor has no {isa}")
    loaded = load(model_path(MODELS[0]))
    tiles = prompt(ids(70, loaded.facts.vocab))
    backends = [loaded.backend(name, "fp32", 8, models_dir() / "cache", isa) for name in ("torch", "cpu")]
    expected, found = (backend.forward(tiles)[-1] for backend in backends)
    assert distance(found, expected) < CLOSE["fp32"]
    assert int(found.argmax()) == int(expected.argmax())


SHAPES = [
    {"head_size": 64, "heads": 2, "kv_heads": 2},
    {"head_size": 128, "heads": 1, "kv_heads": 1},
    {"head_size": 64, "heads": 7, "kv_heads": 1, "hidden": 448},
    {"head_size": 128, "heads": 8, "kv_heads": 2, "hidden": 1024},
    {"head_size": 48, "heads": 3, "kv_heads": 3, "hidden": 144},
    {"head_size": 256, "heads": 1, "kv_heads": 1, "hidden": 256},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"d{s['head_size']}-{s['heads']}of{s['kv_heads']}")
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_any_shape_of_heads_gives_what_torch_gives(shape: dict[str, int], isa: str) -> None:
    from engine.backends.torch_exact import TorchExact

    if isa not in runnable():
        pytest.skip(f"this processor has no {isa}")
    facts, arrays = random_model(**shape)
    weights = Weights("fp32", arrays)
    tiles = prompt(ids(101, facts.vocab))
    expected = TorchExact(facts, weights, pool_blocks=8, threads=2).forward(tiles)[-1]
    assert distance(cpu_backend(facts, weights, 8, isa).forward(tiles)[-1], expected) < CLOSE["fp32"]


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_depend_on_neither_chunks_nor_neighbours_on_any_instruction_set(
    tiny: Loaded, isa: str, dtype: str
) -> None:
    if isa not in runnable():
        pytest.skip(f"this processor has no {isa}")
    backend = tiny.backend("cpu", dtype, 24, isa=isa)
    tokens = ids(90, tiny.facts.vocab)
    whole = backend.forward(prompt(tokens))[-1]
    for at in range(90):
        table = tuple(range(12, 12 + at // PAGE_SIZE + 1))
        alone = Tile(table, at % PAGE_SIZE, (tokens[at],), True)
        neighbour = Tile((20,), 0, tuple(tokens[: 1 + at % PAGE_SIZE]))
        single = backend.forward([neighbour, alone])[-1]
    assert np.array_equal(whole, single)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_long_context_has_the_same_bits_whole_and_in_segments(tiny: Loaded, dtype: str) -> None:
    """A lone token has its segments shared out among threads; a long prompt walks them one after another."""
    backend = tiny.backend("cpu", dtype, 64)
    tokens = ids(491, tiny.facts.vocab)
    tiles = prompt(tokens)
    assert len(tiles[-1].blocks) > 16
    whole = backend.forward(tiles)[-1]
    *before, last = prompt(tokens)
    backend.forward(before)
    for at, token in enumerate(last.tokens):
        alone = backend.forward([Tile(last.blocks, at, (token,), True)])[-1]
    assert np.array_equal(whole, alone)
    reference = tiny.backend("torch", dtype, 64).forward(tiles)[-1]
    assert distance(whole, reference) < CLOSE[dtype]


def test_bits_and_identity_do_not_depend_on_the_number_of_threads(tiny: Loaded) -> None:
    from engine.backends.cpu import Cpu

    tiles = prompt(ids(77, tiny.facts.vocab))
    seen = []
    for threads in (1, 2, 5):
        backend = Cpu(
            tiny.facts,
            tiny.weights("bf16", None),
            library=native_library(),
            pool_blocks=8,
            threads=threads,
        )
        seen.append((backend.forward(tiles)[-1].tobytes(), backend.snapshot(3, 9), backend.identity))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 15, 16])
def test_a_snapshot_holds_the_first_rows_and_zeros(tiny: Loaded, dtype: str, rows: int) -> None:
    backend = tiny.backend("cpu", dtype, 4)
    tokens = ids(16, tiny.facts.vocab)
    backend.forward([Tile((0,), 0, tuple(tokens))])
    if rows:
        backend.forward([Tile((1,), 0, tuple(tokens[:rows]))])
    assert backend.snapshot(0, rows) == bytes(backend.page(1))


def test_a_width_that_does_not_fill_the_vectors_is_refused_with_a_reason() -> None:
    facts, arrays = random_model(ffn=72)
    with pytest.raises(BackendUnavailable, match="ffn size that is a multiple of 16; this model has 72"):
        cpu_backend(facts, Weights("fp32", arrays), 2)
