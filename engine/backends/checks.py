"""What backends may take for granted: of a step, where it is a fault of ours, and of a precision, where it is not."""

from __future__ import annotations

from collections.abc import Iterable

from engine.backends.face import Tile
from engine.errors import BackendUnavailable
from engine.facts import PAGE_SIZE, ModelFacts
from engine.modelfile import parts
from engine.precision import Precision

_PARTS = ("q", "k", "v", "o", "gate", "up", "down", "q_a", "q_b", "kv_a")  # what is quantised of a layer
PROJECTIONS = ("q", "qkv", "o", "gate_up", "down", "q_a", "q_b", "kv_a")  # the same, as `Weights` has it fused
_GROUPS = {"w4a16": 128, "w8a16": 16, "w8a8": 16}  # of the kernels: rows of weights are whole numbers of them


def check_tiles(tiles: Iterable[Tile], facts: ModelFacts, pool_blocks: int) -> None:
    """Assert that rows are in their page, pages in the context and the pool, and tokens in the vocabulary."""
    pages = -(-facts.context // PAGE_SIZE)
    for tile in tiles:
        assert tile.tokens
        assert 0 <= tile.row <= PAGE_SIZE - len(tile.tokens)
        assert 1 <= len(tile.blocks) <= pages
        assert min(tile.tokens) >= 0
        assert max(tile.tokens) < facts.vocab
        assert min(tile.blocks) >= 0
        assert max(tile.blocks) < pool_blocks


def check_precision(facts: ModelFacts, precision: Precision) -> None:
    """Raises BackendUnavailable where a model's shapes do not have this precision.

    A model is quantised whole or not at all: where some matrices stayed in bf16, it would not be as small as was asked.
    """
    if precision.kv == "e4m3" and facts.mla:
        raise BackendUnavailable(
            f"{facts.name} has latent attention, whose pages are not kept in e4m3:"
            " set --kv-dtype auto (TENUTO_KV_DTYPE)"
        )
    if precision.kv == "e4m3" and precision.dtype == "w4a8":
        raise BackendUnavailable(
            "w4a8 runs on the cpu backend, which does not keep KV in e4m3: set --kv-dtype auto (TENUTO_KV_DTYPE),"
            " or --dtype w4a16 (TENUTO_ENGINE_DTYPE) on a GPU"
        )
    group = _GROUPS.get(precision.dtype, 1)
    for name, shape in parts(facts).items():
        if name.rpartition(".")[2] in _PARTS and "." in name and shape[1] % group:
            other = "w8a16 or bf16" if precision.dtype == "w4a16" and shape[1] % 16 == 0 else "bf16"
            raise BackendUnavailable(
                f"{facts.name} has rows of {shape[1]} weights in {name}, and {precision.dtype} takes whole groups of"
                f" {group}: set --dtype {other} (TENUTO_ENGINE_DTYPE)"
            )
