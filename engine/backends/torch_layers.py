"""What one layer multiplies by, in plain torch operators over one 16-row tile: every product has one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.facts import LATENT_NORM_EPS, PAGE_SIZE, ModelFacts
from engine.weights import Weights

Linear = Callable[[Tensor], Tensor]
Rope = tuple[Tensor, Tensor]  # cos and sin of 16 positions, each [16, rope_size/2]


class Layer:
    """The weights of one layer, linear ones as callables [16, in] -> [16, out]."""

    def __init__(self, facts: ModelFacts, weights: Weights, layer: int) -> None:
        def named(name: str) -> Tensor:
            return as_tensor(weights.arrays[f"{layer}.{name}"])

        self.attn_norm = named("attn_norm")
        self.ffn_norm = named("ffn_norm")
        self.attention: Attention | LatentAttention = (LatentAttention if facts.mla else Attention)(
            facts, {name.split(".")[1]: as_tensor(value) for name, value in weights.arrays.items() if _of(name, layer)}
        )
        self.o = linear(named("o"))
        self.gate_up = linear(named("gate_up"))
        self.down = linear(named("down"))


class Attention:
    """Heads of queries over fewer heads of keys and values."""

    def __init__(self, facts: ModelFacts, named: dict[str, Tensor]) -> None:
        self._facts = facts
        self._qkv = linear(named["qkv"])
        self._bias = named.get("qkv_bias")
        self._q_norm, self._k_norm = named.get("q_norm"), named.get("k_norm")

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """x [16, H] -> queries [Hkv, G*16, d], and what a page takes of keys and values [2, Hkv, 16, d]."""
        facts = self._facts
        fused = self._qkv(x).float()
        if self._bias is not None:
            fused += self._bias
        heads = fused.view(PAGE_SIZE, facts.heads + 2 * facts.kv_heads, facts.head_size).transpose(0, 1)
        turning, value = heads[: -facts.kv_heads], heads[-facts.kv_heads :].to(x.dtype)
        if self._q_norm is not None and self._k_norm is not None:
            query, key = turning[: facts.heads], turning[facts.heads :]
            turning = torch.cat(
                [normed(query, self._q_norm, facts.norm_eps), normed(key, self._k_norm, facts.norm_eps)]
            )
        turned = rotate(turning, rope).to(x.dtype)
        query = turned[: facts.heads].reshape(facts.kv_heads, -1, facts.head_size)
        return query, torch.stack([turned[facts.heads :], value])

    def finish(self, mixed: Tensor) -> Tensor:
        """Weighted values [Hq, 16, d] -> what the output projection takes [16, Hq*d]."""
        return mixed.transpose(0, 1).reshape(PAGE_SIZE, -1)


class LatentAttention:
    """DeepSeek's latents (DeepSeek-V2, section 2.1.2, appendix C): keys and values are never unfolded.

    A query is multiplied by the matrix that would have made keys of latents, and the weighted latents by the one that
    would have made values. So every head attends to the one row that a token left: its latent, then its rotated key.
    """

    def __init__(self, facts: ModelFacts, named: dict[str, Tensor]) -> None:
        assert facts.mla is not None
        self._facts, self._mla = facts, facts.mla
        self._q = linear(named["q"]) if "q" in named else None
        self._q_a, self._q_b = (linear(named[name]) if name in named else None for name in ("q_a", "q_b"))
        self._q_norm, self._kv_norm = named.get("q_a_norm"), named["kv_a_norm"]
        self._kv_a = linear(named["kv_a"])
        unfolding = named["kv_b"].view(facts.heads, -1, self._mla.kv_rank)
        self._keys = unfolding[:, : self._mla.nope_size].contiguous()  # [Hq, nope, rank]
        self._values = unfolding[:, self._mla.nope_size :].transpose(1, 2).contiguous()  # [Hq, rank, value]

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """x [16, H] -> queries [1, Hq*16, d], and what a page takes [1, 1, 16, d], where d is rank + rope_size."""
        mla, dtype = self._mla, x.dtype
        heads = self._queries(x).float().view(PAGE_SIZE, self._facts.heads, -1).transpose(0, 1)
        still, turning = torch.split(heads, [mla.nope_size, mla.rope_size], dim=-1)
        query = torch.cat([torch.bmm(still.to(dtype), self._keys), rotate(turning, rope).to(dtype)], dim=-1)
        latent, key = torch.split(self._kv_a(x).float(), [mla.kv_rank, mla.rope_size], dim=-1)
        row = torch.cat([normed(latent, self._kv_norm, LATENT_NORM_EPS), rotate(key, rope)], dim=-1).to(dtype)
        return query.reshape(1, -1, self._facts.head_size), row[None, None]

    def finish(self, mixed: Tensor) -> Tensor:
        """Weighted rows [Hq, 16, d] -> what the output projection takes [16, Hq*value]."""
        values = torch.bmm(mixed[..., : self._mla.kv_rank], self._values)
        return values.transpose(0, 1).reshape(PAGE_SIZE, -1)

    def _queries(self, x: Tensor) -> Tensor:
        if self._q is not None:
            return self._q(x)
        assert self._q_a is not None
        assert self._q_b is not None
        assert self._q_norm is not None
        return self._q_b(normed(self._q_a(x).float(), self._q_norm, LATENT_NORM_EPS).to(x.dtype))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate halves: x [..., 16, rope_size]."""
    (cos, sin), (first, second) = rope, x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN can pack linear weights here; those in bf16 it packs on some processors only."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(weight: Tensor) -> Linear:
    """A product with a fixed weight, packed for 16 rows where oneDNN can."""
    if packs(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PAGE_SIZE)
        pointwise = torch.ops.mkldnn._linear_pointwise
        return lambda x: _checked(pointwise(x, packed, None, "none", [], ""))
    return lambda x: functional.linear(x, weight)


def as_tensor(value: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
    """A torch view of an array; uint16 arrays are bf16 bit patterns."""
    tensor = torch.from_numpy(value)
    return tensor.view(torch.bfloat16) if value.dtype == np.uint16 else tensor


def _of(name: str, layer: int) -> bool:
    return name.startswith(f"{layer}.")


def _checked(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
