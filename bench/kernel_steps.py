"""Whole steps of models of production's shapes, for the compile gate: what a backend launches, with its own strides.

Weights are zeros that nobody touches, one layer of them. A name here is no kernel's, and is not counted as one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from bench.gpu_random import Shape, facts_of
from engine.backends.face import cut
from engine.backends.gpu_model import GpuModel
from engine.backends.gpu_step import StepBuffer, StepShape, lay_out
from engine.facts import PAGE_SIZE, Mla, ModelFacts
from engine.kernels.sample import Sample
from engine.precision import Precision
from engine.weights import Array, Weights

STEPS = "(steps)"
_LLAMA = facts_of(Shape(1, 4096, 14_336, 32, 8, 8192, vocab=32_000))
_MLA = Mla(q_rank=1536, kv_rank=512, rope_size=64, nope_size=128, value_size=128)
MODELS = {
    "llama": _LLAMA,
    "qwen2": replace(_LLAMA, qkv_bias=True, hidden=3584, heads=28, kv_heads=4, ffn=18_944),
    "qwen3": replace(_LLAMA, qk_norm=True),
    "mistral": replace(_LLAMA, windows=(4096,)),
    "mla": replace(_LLAMA, mla=_MLA, heads=128, kv_heads=1, head_size=576, hidden=7168),
}
_CHUNK_TOKENS, _PAGES, _BATCH = 300, 64, 8


def steps() -> list[Sample]:
    """A decode step and a mixed one of each model. They are compiled, never run."""
    return [sample for name, facts in MODELS.items() for sample in _steps(name, facts)]


def _steps(name: str, facts: ModelFacts) -> list[Sample]:
    cpu = torch.device("cpu")
    model = GpuModel(facts, Weights("bf16", _zeros(facts)), Precision(), cpu)
    inner = (1, PAGE_SIZE, facts.head_size) if facts.mla else (1, 2, facts.kv_heads, PAGE_SIZE, facts.head_size)
    pool = torch.zeros(_PAGES, *inner, dtype=torch.bfloat16)
    lone = StepBuffer(StepShape(_BATCH, _BATCH, _BATCH, _PAGES, 0, _BATCH), cpu)
    tiles = [*cut([1], 3, [5]), *cut(list(range(2, _PAGES)), 0, [7] * _CHUNK_TOKENS)]
    layout = lay_out(tiles, model.chunk_tokens)
    mixed = StepBuffer(layout.shape, cpu)
    mixed.fill(layout, tiles)
    mixed.send()
    return [
        Sample(f"{name}, {kind}", lambda step=step: _run(model, step, pool), lambda: 0.0, 0.0)  # type: ignore[misc]
        for kind, step in (("decode", lone), ("mixed", mixed))
    ]


def _run(model: GpuModel, step: StepBuffer, pool: torch.Tensor) -> None:
    with torch.inference_mode():
        model.run(step.on_device, pool)


def _zeros(facts: ModelFacts) -> dict[str, Array]:
    hidden, heads = facts.hidden, facts.heads

    def matrix(rows: int, columns: int) -> Array:
        return np.zeros((rows, columns), np.uint16)

    arrays = {"embed": matrix(facts.vocab, hidden), "norm": np.zeros(hidden, np.float32)}
    for name in ("attn_norm", "ffn_norm"):
        arrays[f"0.{name}"] = np.zeros(hidden, np.float32)
    arrays |= {"0.gate_up": matrix(2 * facts.ffn, hidden), "0.down": matrix(hidden, facts.ffn)}
    if facts.mla is None:
        width = (heads + 2 * facts.kv_heads) * facts.head_size
        arrays |= {"0.qkv": matrix(width, hidden), "0.o": matrix(hidden, heads * facts.head_size)}
        arrays |= {"0.qkv_bias": np.zeros(width, np.float32)} if facts.qkv_bias else {}
        norms = ("q_norm", "k_norm") if facts.qk_norm else ()
        return arrays | {f"0.{name}": np.zeros(facts.head_size, np.float32) for name in norms}
    mla = facts.mla
    rank = mla.q_rank or 0
    return arrays | {
        "0.q_a": matrix(rank, hidden),
        "0.q_a_norm": np.zeros(rank, np.float32),
        "0.q_b": matrix(heads * (mla.nope_size + mla.rope_size), rank),
        "0.kv_a": matrix(mla.kv_rank + mla.rope_size, hidden),
        "0.kv_a_norm": np.zeros(mla.kv_rank, np.float32),
        "0.kv_b": matrix(heads * (mla.nope_size + mla.value_size), mla.kv_rank),
        "0.o": matrix(hidden, heads * mla.value_size),
    }
