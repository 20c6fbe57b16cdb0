"""A decoder in Triton kernels: llama, qwen2, qwen3, mistral, and latent attention (MLA) with dense layers.

The residual stream is fp32, products take the weights' dtype and sum in fp32. Every kernel gives a row the same bits
whatever else is in the step, and takes its tensors at fixed addresses, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.backends.gpu_step import StepTensors
from engine.errors import UnsupportedShape
from engine.facts import LATENT_NORM_EPS, PAGE_SIZE, ModelFacts
from engine.kernels.linear import linear, scratch_elements
from engine.kernels.merge import merge
from engine.kernels.mla_decode import config_for as mla_config
from engine.kernels.mla_decode import mla_decode
from engine.kernels.mla_write import mla_write
from engine.kernels.paged_decode import paged_decode, split_tokens
from engine.kernels.paged_prefill import paged_prefill, tile_tokens
from engine.kernels.rmsnorm import rmsnorm
from engine.kernels.rope_kv_write import rope_kv_write
from engine.kernels.shapes import Paged
from engine.kernels.swiglu import swiglu
from engine.rope import attention_scale, rope_table
from engine.weights import Weights

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BeforeLayer = Callable[[int], None]


def check_model(facts: ModelFacts) -> None:
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


class GpuModel:
    """The weights on one device. Raises UnsupportedShape."""

    def __init__(self, facts: ModelFacts, weights: Weights, device: torch.device) -> None:
        check_model(facts)
        self.facts = facts
        self.dtype = DTYPES[weights.dtype]
        self._device = device
        self._layers = [_layer(weights, facts, layer, device) for layer in range(facts.layers)]
        self._embed = _tensor(weights, "embed", device)
        self._norm = _tensor(weights, "norm", device)
        self._head = self._embed if facts.tied_output else _tensor(weights, "head", device)
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
            rmsnorm(delta, residual, layer["attn_norm"], x, eps=self.facts.norm_eps)
            mixed = attend(layer, x, step, pool[:, index], self.facts.window(index))
            delta = self._product(mixed, layer["o"])
            rmsnorm(delta, residual, layer["ffn_norm"], x, eps=self.facts.norm_eps)
            both = self._product(x, layer["gate_up"])
            gated = torch.empty(x.shape[0], both.shape[1] // 2, dtype=self.dtype, device=x.device)
            swiglu(both, gated)
            delta = self._product(gated, layer["down"])
        rmsnorm(delta, residual, self._norm, x, eps=self.facts.norm_eps)
        return self._product(x.index_select(0, step.wanted), self._head)

    # -- attention ------------------------------------------------------------------------------------------------

    def _attend(self, layer: dict[str, Tensor], x: Tensor, step: StepTensors, pages: Tensor, window: int) -> Tensor:
        """[T, Hq * d] of x [T, H]. pages [blocks, 2, Hkv, 16, d]."""
        facts, rows = self.facts, x.shape[0]
        kv = Paged(pages[:, 0], pages[:, 1])
        qkv = self._product(x, layer["qkv"], layer.get("qkv_bias"))
        q = torch.empty(rows, facts.heads, facts.head_size, dtype=self.dtype, device=x.device)
        norms = (layer["q_norm"], layer["k_norm"]) if facts.qk_norm else None
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

    def _attend_latent(
        self, layer: dict[str, Tensor], x: Tensor, step: StepTensors, pages: Tensor, window: int
    ) -> Tensor:
        """[T, H * value] of x. pages [blocks, 16, latent + rope]; queries are absorbed into the latent space."""
        facts, rows = self.facts, x.shape[0]
        mla = facts.mla
        assert mla is not None
        query = self._latent_queries(layer, x).view(rows, facts.heads, mla.nope_size + mla.rope_size)
        down = self._product(x, layer["kv_a"])
        absorbed = torch.empty(rows, facts.heads, facts.head_size, dtype=self.dtype, device=x.device)
        mla_write(
            down, layer["kv_a_norm"], query, self._cos, self._sin, step.position, step.slot, pages,
            absorbed[..., mla.kv_rank :], eps=LATENT_NORM_EPS,
        )  # fmt: skip
        plain = query[..., : mla.nope_size].to(self.dtype).transpose(0, 1)  # [H, T, nope]
        self._product(plain, layer["k_up"], out=absorbed[..., : mla.kv_rank].transpose(0, 1))
        config = mla_config(facts.heads)
        part, lse = self._partials(rows, facts.heads, step.tables.shape[1], config.split_tokens, mla.kv_rank)
        mla_decode(absorbed, pages, step.tables, step.sequence, step.context, part, lse, scale=self._scale)
        mixed = torch.empty(rows, facts.heads, mla.kv_rank, dtype=self.dtype, device=x.device)
        merge(part, lse, step.context, mixed, split=config.split_tokens)
        values = torch.empty(rows, facts.heads, mla.value_size, dtype=self.dtype, device=x.device)
        self._product(mixed.transpose(0, 1), layer["v_up"], out=values.transpose(0, 1))
        return values.view(rows, -1)

    def _latent_queries(self, layer: dict[str, Tensor], x: Tensor) -> Tensor:
        if "q" in layer:
            return self._product(x, layer["q"])
        down = self._product(x, layer["q_a"])
        normed = torch.empty_like(down, dtype=self.dtype)
        rmsnorm(None, down, layer["q_a_norm"], normed, eps=LATENT_NORM_EPS)
        return self._product(normed, layer["q_b"])

    def _partials(self, rows: int, heads: int, pages: int, split: int, width: int) -> tuple[Tensor, Tensor]:
        splits = -(-pages * PAGE_SIZE // split)
        empty = torch.empty(rows * heads * splits * (width + 1), device=self._device)
        count = rows * heads * splits
        return empty[: count * width].view(rows, heads, splits, width), empty[count * width :].view(rows, heads, splits)

    def _product(self, x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(*x.shape[:-1], w.shape[-2], device=x.device)
        if x.shape[-2]:
            groups = x.shape[0] if x.dim() == 3 else 1
            scratch = torch.empty(scratch_elements(x.shape[-2], w.shape[-2], groups), device=x.device)
            linear(x, w, out, bias, scratch)
        return out


def _layer(weights: Weights, facts: ModelFacts, layer: int, device: torch.device) -> dict[str, Tensor]:
    prefix = f"{layer}."
    names = [name.removeprefix(prefix) for name in weights.arrays if name.startswith(prefix)]
    named = {name: _tensor(weights, prefix + name, device) for name in names}
    if facts.mla is None:
        return named
    mla = facts.mla
    up = named.pop("kv_b").view(facts.heads, mla.nope_size + mla.value_size, mla.kv_rank)
    named["k_up"] = up[:, : mla.nope_size].transpose(1, 2).contiguous()  # [H, rank, nope]
    named["v_up"] = up[:, mla.nope_size :].contiguous()  # [H, value, rank]
    return named


def _tensor(weights: Weights, name: str, device: torch.device) -> Tensor:
    """uint16 arrays are bf16 bit patterns."""
    tensor = torch.from_numpy(weights.arrays[name])
    return (tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor).to(device)
