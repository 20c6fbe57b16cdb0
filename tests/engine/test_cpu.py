"""The C++ decoder: instruction sets, shapes, threads, and its pages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends import Tile
from engine.errors import BackendUnavailable
from engine.facts import PAGE_SIZE, ModelFacts, fingerprint
from engine.native import INSTRUCTION_SETS
from engine.quantised import pack, quantise
from engine.weights import Weights, _to_dtype
from tests.engine.conftest import MODELS, Loaded, cpu_backend, load, model_path, models_dir, native_library

DTYPES = ("fp32", "bf16", "w4a8")
CLOSE = {"fp32": 1e-5, "bf16": 4e-2, "w4a8": 6e-2}  # of the greatest logit


def random_model(**changes: Any) -> tuple[ModelFacts, dict[str, np.ndarray[Any, np.dtype[Any]]]]:
    """A decoder of any shape with random fp32 weights."""
    sizes: dict[str, Any] = {
        "layers": 2,
        "hidden": 128,
        "ffn": 80,
        "heads": 2,
        "kv_heads": 1,
        "head_size": 64,
        "tied_output": False,
        "qkv_bias": True,
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
        size_bytes=0,
        **sizes,
    )
    rng = np.random.default_rng(5)
    wide, qkv = facts.hidden, (facts.heads + 2 * facts.kv_heads) * facts.head_size

    def matrix(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    arrays = {"embed": matrix(facts.vocab, wide), "norm": np.ones(wide, np.float32)}
    if not facts.tied_output:
        arrays["head"] = matrix(facts.vocab, wide)
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
        if not facts.qkv_bias:
            del arrays[f"{layer}.qkv_bias"]
    return facts, arrays


def in_groups(arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights for w4a8, and in fp32 the weights that those are."""
    grouped, same = {"embed": _to_dtype(arrays["embed"], "w4a8")}, {"head": arrays["embed"], **arrays}
    for name, value in same.items():
        part = name.split(".")[-1]
        if part in ("qkv", "o", "gate_up", "down", "head"):
            groups = quantise(value)
            same[name] = groups.values()
            grouped[name], grouped[f"{name}.kinds"] = pack([groups], gated=part == "gate_up")
        elif part != "embed":
            grouped[name] = value
    return grouped, same


def prompt(tokens: list[int]) -> list[Tile]:
    starts = range(0, len(tokens), PAGE_SIZE)
    return [
        Tile(tuple(range(n + 1)), 0, tuple(tokens[at : at + PAGE_SIZE]), at + PAGE_SIZE >= len(tokens))
        for n, at in enumerate(starts)
    ]


def ids(count: int, vocab: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(1).integers(0, vocab, count)]


def reference_logits(loaded: Loaded, dtype: str, tiles: list[Tile]) -> Any:
    """What torch gives, for w4a8 in fp32: its weights here are fp32 ones in 8 bits."""
    return loaded.backend("torch", "fp32" if dtype == "w4a8" else dtype, 64).forward(tiles)[-1]


def distance(left: Any, right: Any) -> float:
    return float(np.abs(left - right).max() / np.abs(right).max())


def runnable() -> tuple[str, ...]:
    """The instruction sets of this machine."""
    best = native_library().best_instruction_set
    return INSTRUCTION_SETS[: INSTRUCTION_SETS.index(best) + 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_instruction_sets_agree_closely(tiny: Loaded, dtype: str) -> None:
    tiles = prompt(ids(150, tiny.facts.vocab))
    reference = reference_logits(tiny, dtype, tiles)
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


SHAPES: list[dict[str, Any]] = [
    {"head_size": 64, "heads": 2, "kv_heads": 2, "tied_output": True},
    {"head_size": 128, "heads": 1, "kv_heads": 1, "qkv_bias": False},
    {"head_size": 64, "heads": 7, "kv_heads": 1, "hidden": 448},
    {"head_size": 128, "heads": 8, "kv_heads": 2, "hidden": 1024, "tied_output": True, "qkv_bias": False},
    {"head_size": 48, "heads": 3, "kv_heads": 3, "hidden": 144},
    {"head_size": 256, "heads": 1, "kv_heads": 1, "hidden": 256},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"d{s['head_size']}-{s['heads']}of{s['kv_heads']}")
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_any_shape_gives_what_torch_gives(shape: dict[str, Any], isa: str) -> None:
    from engine.backends.torch_exact import TorchExact

    if isa not in runnable():
        pytest.skip(f"this processor has no {isa}")
    facts, arrays = random_model(**shape)
    weights = Weights("fp32", arrays)
    tiles = prompt(ids(101, facts.vocab))
    expected = TorchExact(facts, weights, pool_blocks=8, threads=2).forward(tiles)[-1]
    assert distance(cpu_backend(facts, weights, 8, isa).forward(tiles)[-1], expected) < CLOSE["fp32"]


@pytest.mark.parametrize("shape", [s for s in SHAPES if s["head_size"] != 48], ids=lambda s: f"d{s['head_size']}")
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_any_shape_in_groups_of_32_gives_nearly_what_its_weights_give_in_fp32(shape: dict[str, Any], isa: str) -> None:
    if isa not in runnable():
        pytest.skip(f"this processor has no {isa}")
    facts, arrays = random_model(ffn=96, **shape)
    grouped, same = in_groups(arrays)
    tiles = prompt(ids(101, facts.vocab))
    expected = cpu_backend(facts, Weights("fp32", same), 8).forward(tiles)[-1]
    assert distance(cpu_backend(facts, Weights("w4a8", grouped), 8, isa).forward(tiles)[-1], expected) < CLOSE["w4a8"]


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_long_context_gives_what_torch_gives(tiny: Loaded, dtype: str) -> None:
    tiles = prompt(ids(491, tiny.facts.vocab))
    reference = tiny.backend("torch", dtype, 64).forward(tiles)[-1]
    assert distance(tiny.backend("cpu", dtype, 64).forward(tiles)[-1], reference) < 2 * CLOSE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_and_identity_do_not_depend_on_the_number_of_threads(tiny: Loaded, dtype: str) -> None:
    from engine.backends.cpu import Cpu

    tiles = prompt(ids(77, tiny.facts.vocab))
    seen = []
    for threads in (1, 2, 5):
        backend = Cpu(
            tiny.facts,
            tiny.weights(dtype, None),
            library=native_library(),
            pool_blocks=8,
            threads=threads,
        )
        seen.append((backend.forward(tiles)[-1].tobytes(), backend.snapshot(3, 9), backend.identity))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 15, 16])
def test_a_snapshot_holds_the_first_rows_and_zeros(tiny: Loaded, dtype: str, rows: int) -> None:
    backend = tiny.backend("cpu", dtype, 4)
    tokens = ids(16, tiny.facts.vocab)
    backend.forward([Tile((0,), 0, tuple(tokens))])
    if rows:
        backend.forward([Tile((1,), 0, tuple(tokens[:rows]))])
    assert backend.snapshot(0, rows) == bytes(backend.page(1))


@pytest.mark.parametrize(("dtype", "ffn", "multiple"), [("fp32", 72, 16), ("w4a8", 80, 32)])
def test_a_width_that_does_not_fill_the_vectors_is_refused_with_a_reason(dtype: str, ffn: int, multiple: int) -> None:
    facts, arrays = random_model(ffn=ffn)
    with pytest.raises(BackendUnavailable, match=f"ffn size that is a multiple of {multiple} for {dtype}; this"):
        cpu_backend(facts, Weights(dtype, arrays), 2)


def test_torch_refuses_w4a8_and_says_what_runs_it(tiny: Loaded) -> None:
    with pytest.raises(BackendUnavailable, match="runs bf16 and fp32; w4a8 needs the cpu backend"):
        tiny.backend("torch", "w4a8", 4)


def test_pages_of_w4a8_are_as_large_as_those_of_bf16_and_of_another_fingerprint(tiny: Loaded) -> None:
    sizes = {dtype: tiny.facts.page_bytes(dtype) for dtype in DTYPES}
    assert sizes["w4a8"] == sizes["bf16"] == sizes["fp32"] // 2
    backends = [tiny.backend("cpu", dtype, 2) for dtype in DTYPES]
    assert len(backends[2].page(0)) == sizes["w4a8"]
    assert len({fingerprint(tiny.digest, tiny.facts, backend.identity) for backend in backends}) == 3


TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def helpers(before: set[str]) -> list[Path]:
    """The threads of this process that are not in `before`."""
    return [task for task in Path("/proc/self/task").iterdir() if task.name not in before]


def state_and_cpu_s(task: Path) -> tuple[str, float]:
    """One letter, S for asleep, and the processor time so far: proc(5), after the name in parentheses."""
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) * TICK_S


def test_threads_with_nothing_to_do_fall_asleep(tiny: Loaded) -> None:
    from engine.backends.cpu import Cpu

    before = {task.name for task in Path("/proc/self/task").iterdir()}
    backend = Cpu(tiny.facts, tiny.weights("bf16", None), library=native_library(), pool_blocks=8, threads=3)
    backend.forward(prompt(ids(77, tiny.facts.vocab)))
    crew = helpers(before)
    assert len(crew) == 2
    for task in crew:
        _, started = state_and_cpu_s(task)
        while state_and_cpu_s(task)[0] != "S":
            assert state_and_cpu_s(task)[1] - started < 1, "a thread spins for longer than any gap between jobs"
    del backend
    assert helpers(before) == []
