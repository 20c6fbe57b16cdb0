"""Families whose layers, some or all, keep a constant state."""

from __future__ import annotations

import math
from typing import Final

from engine.capacity.keys import Keys, divides
from engine.capacity.layers import STATE_BYTES, Heads, Layer, dense, gated_delta, mamba, mamba2, short_convolution
from engine.capacity.sketch import Sketch
from engine.errors import PlanError

_LINEAR: Final = ("linear_attention", "full_attention")
_CONVOLUTION: Final = ("conv", "full_attention")
_IN_FP32 = "recurrent states in fp32, convolutions in 16 bits"


def gated_hybrid(keys: Keys, hidden: int, count: int) -> tuple[list[Layer], Heads, tuple[tuple[str, int], ...]]:
    """Qwen3-Next: gated delta layers, and full attention with a gate in every fourth."""
    heads = Heads.read(keys, hidden)
    every = keys.integer("full_attention_interval", "layers", 4) if not keys.has("layer_types") else 1
    named = keys.names("layer_types", count, _LINEAR) or [_LINEAR[(at + 1) % every == 0] for at in range(count)]
    kept = (keys.integer("linear_num_key_heads", "heads"), keys.integer("linear_key_head_dim", "size"))
    values = (keys.integer("linear_num_value_heads", "heads"), keys.integer("linear_value_head_dim", "size"))
    divides("linear_num_value_heads", values[0], "linear_num_key_heads", kept[0])
    keys.assumed.append(_IN_FP32)
    linear = gated_delta(hidden, kept, values, keys.integer("linear_conv_kernel_dim", "small"), STATE_BYTES)
    full = heads.layer(gate=True, head_norm=True)
    degrees = (("linear_num_key_heads", kept[0]),)
    return [full if one == "full_attention" else linear for one in named], heads, degrees


def jamba(keys: Keys, hidden: int, count: int) -> tuple[list[Layer], Heads, list[bool]]:
    """Layers with attention and mixtures at given offsets, Mamba in all others. The third: which are mixtures."""
    heads = Heads.read(keys, hidden)
    inner = hidden * keys.integer("mamba_expand", "small", 2)
    rank = _rank(keys, "mamba_dt_rank", hidden)
    state, kernel = keys.integer("mamba_d_state", "size", 16), keys.integer("mamba_d_conv", "small", 4)
    bias = (keys.flag("mamba_conv_bias", True), keys.flag("mamba_proj_bias"))
    keys.assumed.append(_IN_FP32)
    linear = mamba(hidden, inner, state, kernel, rank, bias=bias, norms=True)
    full = heads.layer()
    mixers = [full if one else linear for one in _at(keys, "attn_layer", count)]
    return mixers, heads, _at(keys, "expert_layer", count)


def pure_mamba(keys: Keys) -> Sketch:
    hidden, count = keys.integer("hidden_size", "size"), keys.integer("num_hidden_layers", "layers")
    inner = keys.integer("intermediate_size", "ffn", hidden * keys.integer("expand", "small", 2))
    state, kernel = keys.integer("state_size", "size", 16), keys.integer("conv_kernel", "small", 4)
    keys.assumed.append(_IN_FP32)
    bias = (keys.flag("use_conv_bias", True), keys.flag("use_bias"))
    one = mamba(hidden, inner, state, kernel, _rank(keys, "time_step_rank", hidden), bias=bias, norms=False)
    layers = [one.with_mlp(dense(0, 0), hidden)] * count
    return Sketch(hidden, None, layers, degrees=(("intermediate_size", inner),), tied=True, context=1 << 20)


def pure_mamba2(keys: Keys) -> Sketch:
    hidden, count = keys.integer("hidden_size", "size"), keys.integer("num_hidden_layers", "layers")
    heads, size = keys.integer("num_heads", "heads"), keys.integer("head_dim", "size", 64)
    expand = keys.integer("expand", "small", 2)
    if heads * size != expand * hidden:
        raise PlanError("num_heads", f"{heads} heads of {size} are not expand {expand} times hidden_size {hidden}")
    state, groups = keys.integer("state_size", "size", 128), keys.integer("n_groups", "heads", 8)
    keys.assumed.append(_IN_FP32)
    bias = (keys.flag("use_conv_bias", True), keys.flag("use_bias"))
    one = mamba2(hidden, heads, size, state, groups, keys.integer("conv_kernel", "small", 4), bias=bias)
    layers = [one.with_mlp(dense(0, 0), hidden)] * count
    return Sketch(hidden, None, layers, degrees=(("num_heads", heads),), context=1 << 20)


def lfm2(keys: Keys) -> Sketch:
    """Short convolutions, and attention with norms of q and k in some layers."""
    hidden, count = keys.integer("hidden_size", "size"), keys.integer("num_hidden_layers", "layers")
    heads, width = Heads.read(keys, hidden), _lfm2_width(keys)
    kinds = keys.names("layer_types", count, _CONVOLUTION)
    if kinds is None:
        full = keys.indices("full_attn_idxs", count)
        if full is None:
            raise PlanError("layer_types", "the config has neither it nor full_attn_idxs; one of them is needed")
        kinds = [_CONVOLUTION[at in full] for at in range(count)]
    biased = keys.flag("conv_bias")
    short = short_convolution(hidden, keys.integer("conv_L_cache", "small", 3), bias=biased)
    attention = heads.layer(head_norm=True)
    mlp = dense(hidden, width)
    layers = [(attention if one == "full_attention" else short).with_mlp(mlp, 2 * hidden) for one in kinds]
    return Sketch(hidden, heads, layers, degrees=(("intermediate_size", width),), tied=True)


def _lfm2_width(keys: Keys) -> int:
    """Two thirds of what the config says, times a factor, up to a multiple: unless that is turned off."""
    wide = keys.integer("block_ff_dim", "ffn") if keys.has("block_ff_dim") else keys.integer("intermediate_size", "ffn")
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return wide
    wide = int(2 * wide / 3)
    if keys.has("block_ffn_dim_multiplier"):
        wide = int(keys.real("block_ffn_dim_multiplier", 1.0) * wide)
    step = keys.integer("block_multiple_of", "ffn", 256)
    return step * -(-wide // step)


def _at(keys: Keys, what: str, count: int) -> list[bool]:
    period, offset = keys.integer(f"{what}_period", "layers"), keys.integer(f"{what}_offset", "layers", least=0)
    if offset >= period:
        raise PlanError(f"{what}_offset", f"{offset} is not below {what}_period {period}")
    return [at % period == offset for at in range(count)]


def _rank(keys: Keys, key: str, hidden: int) -> int:
    if keys.config.get(key) in (None, "auto"):
        return math.ceil(hidden / 16)
    return keys.integer(key, "size")
