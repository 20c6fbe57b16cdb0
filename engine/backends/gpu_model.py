"""A decoder in Triton kernels: llama, qwen2, qwen3, mistral, and latent attention (MLA) with dense layers.

The residual stream is fp32, activations have the type in which the weights come (see `gpu_weights` for what they are
kept in), products sum in fp32. Every kernel gives a row the same bits whatever else is in the step, and takes its
tensors at fixed addresses, so a step can be captured.

KV in e4m3 is stored without a scale: the format has the same relative precision from 2^-6 to 448. Over 384 tokens of
English, keys reach 22 in SmolLM2 and 220 in Qwen2.5-Coder-0.5B, values 14 and 20, and their relative error is 2.5 to
3.1 % in every layer. A scale that made them larger would clip Qwen's keys, at a quarter already by up to 37 %.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.backends.checks import check_precision
from engine.backends.gpu_step import StepTensors
from engine.backends.gpu_weights import GpuLayer, Matrix, Plain, load_layer
from engine.backends.torch_layers import as_tensor
from engine.errors import UnsupportedShape
from engine.facts import LATENT_NORM_EPS, PAGE_SIZE, ModelFacts
from engine.kernels.merge import merge
from engine.kernels.mla_decode import config_for as mla_config
from engine.kernels.mla_decode import mla_decode
from engine.kernels.mla_write import mla_write
from engine.kernels.paged_decode import paged_decode, split_tokens
from engine.kernels.paged_prefill import paged_prefill, tile_tokens
from engine.kernels.rmsnorm import rmsnorm
from engine.kernels.rope_kv_write import rope_kv_write
from engine.kernels.shapes import WITHOUT_E4M3, Paged
from engine.kernels.swiglu import swiglu
from engine.kernels.target import arch
from engine.precision import Precision
from engine.rope import attention_scale, rope_table
from engine.weights import Weights

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # in which weights come and products are taken
# Partial results of latent attention that are held at once, fp32: a chunk of a prompt behind a long context has
# gigabytes of them, and a step is to find room in its workspace.
_MOST_PARTIALS = 64 << 20
BeforeLayer = Callable[[int], None]


def check_model(facts: ModelFacts, precision: Precision) -> None:
    """Raises UnsupportedShape for a model that the kernels cannot run, before anything is allocated."""
    sizes = [facts.head_size] if facts.mla is None else [facts.mla.kv_rank, facts.mla.rope_size]
    for size in sizes:
        if size & (size - 1) or not 2 <= size <= 512:
            raise UnsupportedShape(
                f"{facts.name} has heads of {size}; the GPU backend runs powers of two: set backend = cpu or torch"
            )
    if facts.mla is None and not 16 <= facts.head_size <= 256:
        raise UnsupportedShape(
            f"{facts.name} has heads of {facts.head_size}; the GPU backend runs 16 to 256: set backend = cpu or torch"
        )
    if facts.heads // facts.kv_heads > 128 and facts.mla is None:
        raise UnsupportedShape(
            f"{facts.name} has {facts.heads // facts.kv_heads} query heads per KV head; 128 are possible on a GPU"
        )
    if precision.kv == "e4m3" and arch() in WITHOUT_E4M3:
        raise UnsupportedShape(
            f"KV in e4m3 needs a GPU from sm_89 on, this is {arch()}: set --kv-dtype auto (TENUTO_KV_DTYPE)"
        )
    check_precision(facts, precision)


class GpuModel:
    """The weights on one device. Raises UnsupportedShape."""

    def __init__(self, facts: ModelFacts, weights: Weights, precision: Precision, device: torch.device) -> None:
        check_model(facts, precision)
        self.facts = facts
        self.dtype = DTYPES[weights.dtype]
        self.kv_dtype = torch.float8_e4m3fn if precision.kv == "e4m3" else self.dtype
        self._device = device
        self._layers = [load_layer(weights, facts, n, precision.dtype, device) for n in range(facts.layers)]
        self._embed = as_tensor(weights.arrays["embed"]).to(device)
        self._norm = as_tensor(weights.arrays["norm"]).to(device)
        self._head = Plain(self._embed if facts.tied_output else as_tensor(weights.arrays["head"]).to(device))
        self._cos, self._sin = (torch.from_numpy(table).to(device) for table in rope_table(facts))
        self._scale = attention_scale(facts)
        self.chunk_tokens = PAGE_SIZE if facts.mla else tile_tokens(facts.head_size, facts.heads // facts.kv_heads)

    def run(self, step: StepTensors, pool: Tensor, before_layer: BeforeLayer | None = None) -> Tensor:
        """Logits fp32 [wanted, vocab], on the device. `pool` as `GpuPages.layers` gives it."""
        residual = self._embed.index_select(0, step.tokens).float()  # [T, H]
        x = torch.empty_like(residual, dtype=self.dtype)
        delta: Tensor | None = None
        attend = self._attend if self.facts.mla is None else self._attend_latent
        for index, layer in enumerate(self._layers):
            if before_layer is not None:
                before_layer(index)
            rmsnorm(delta, residual, layer.vectors["attn_norm"], x, eps=self.facts.norm_eps)
            mixed = attend(layer, x, step, pool[:, index], self.facts.window(index))
            delta = self._product(mixed, layer.matrices["o"])
            rmsnorm(delta, residual, layer.vectors["ffn_norm"], x, eps=self.facts.norm_eps)
            both = self._product(x, layer.matrices["gate_up"])
            gated = torch.empty(x.shape[0], both.shape[1] // 2, dtype=self.dtype, device=x.device)
            swiglu(both, gated)
            delta = self._product(gated, layer.matrices["down"])
        rmsnorm(delta, residual, self._norm, x, eps=self.facts.norm_eps)
        return self._product(x.index_select(0, step.wanted), self._head)

    # -- attention ------------------------------------------------------------------------------------------------

    def _attend(self, layer: GpuLayer, x: Tensor, step: StepTensors, pages: Tensor, window: int) -> Tensor:
        """[T, Hq * d] of x [T, H]. pages [blocks, 2, Hkv, 16, d]."""
        facts, rows = self.facts, x.shape[0]
        kv = Paged(pages[:, 0], pages[:, 1])
        qkv = self._product(x, layer.matrices["qkv"], layer.vectors.get("qkv_bias"))
        q = torch.empty(rows, facts.heads, facts.head_size, dtype=self.dtype, device=x.device)
        norms = (layer.vectors["q_norm"], layer.vectors["k_norm"]) if facts.qk_norm else None
        rope_kv_write(qkv, self._cos, self._sin, step.position, step.slot, q, kv, norms, eps=facts.norm_eps)
        out = torch.empty_like(q)
        decodes = step.length.shape[0]
        if decodes:
            split = split_tokens(facts.head_size)
            part, lse = self._partials(decodes, facts.heads, step.tables.shape[1], split, facts.head_size)
            paged_decode(q[:decodes, None], kv, step.tables, step.length, part, lse, scale=self._scale, window=window)
            merge(part, lse, step.length, out[:decodes], split=split, window=window)
        if step.tiles.shape[0]:
            paged_prefill(q, kv, step.tables, step.tiles, out, scale=self._scale, window=window)
        return out.view(rows, -1)

    def _attend_latent(self, layer: GpuLayer, x: Tensor, step: StepTensors, pages: Tensor, window: int) -> Tensor:
        """[T, H * value] of x. pages [blocks, 16, latent + rope]; queries are absorbed into the latent space."""
        facts, rows = self.facts, x.shape[0]
        mla = facts.mla
        assert mla is not None
        query = self._latent_queries(layer, x).view(rows, facts.heads, mla.nope_size + mla.rope_size)
        down = self._product(x, layer.matrices["kv_a"])
        absorbed = torch.empty(rows, facts.heads, facts.head_size, dtype=self.dtype, device=x.device)
        mla_write(
            down, layer.vectors["kv_a_norm"], query, self._cos, self._sin, step.position, step.slot, pages,
            absorbed[..., mla.kv_rank :], eps=LATENT_NORM_EPS,
        )  # fmt: skip
        plain = query[..., : mla.nope_size].to(self.dtype).transpose(0, 1)  # [H, T, nope]
        self._product(plain, layer.matrices["k_up"], out=absorbed[..., : mla.kv_rank].transpose(0, 1))
        mixed = torch.empty(rows, facts.heads, mla.kv_rank, dtype=self.dtype, device=x.device)
        split, table = mla_config(facts.heads).split_tokens, step.tables
        a_row = facts.heads * -(-table.shape[1] * PAGE_SIZE // split) * (mla.kv_rank + 1)
        most = max(1, _MOST_PARTIALS // a_row)
        for some in (slice(at, min(at + most, rows)) for at in range(0, rows, most)):
            part, lse = self._partials(some.stop - some.start, facts.heads, table.shape[1], split, mla.kv_rank)
            sequence, context = step.sequence[some], step.context[some]
            mla_decode(absorbed[some], pages, table, sequence, context, part, lse, scale=self._scale)
            merge(part, lse, context, mixed[some], split=split)
        values = torch.empty(rows, facts.heads, mla.value_size, dtype=self.dtype, device=x.device)
        self._product(mixed.transpose(0, 1), layer.matrices["v_up"], out=values.transpose(0, 1))
        return values.view(rows, -1)

    def _latent_queries(self, layer: GpuLayer, x: Tensor) -> Tensor:
        if "q" in layer.matrices:
            return self._product(x, layer.matrices["q"])
        down = self._product(x, layer.matrices["q_a"])
        normed = torch.empty_like(down, dtype=self.dtype)
        rmsnorm(None, down, layer.vectors["q_a_norm"], normed, eps=LATENT_NORM_EPS)
        return self._product(normed, layer.matrices["q_b"])

    def _partials(self, rows: int, heads: int, pages: int, split: int, width: int) -> tuple[Tensor, Tensor]:
        splits = -(-pages * PAGE_SIZE // split)
        empty = torch.empty(rows * heads * splits * (width + 1), device=self._device)
        count = rows * heads * splits
        return empty[: count * width].view(rows, heads, splits, width), empty[count * width :].view(rows, heads, splits)

    def _product(self, x: Tensor, w: Matrix, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(*x.shape[:-1], w.outputs, device=x.device)
        if x.shape[-2]:
            w.product(x, out, bias)
        return out
