"""The parts that decoders are made of: what each keeps of a session, and its weights."""

from __future__ import annotations

from dataclasses import dataclass

from engine.capacity.facts import (
    Group,
    KvHeads,
    Parameters,
    QueryHeads,
    attention_group,
    latent_group,
    state_group,
)
from engine.capacity.keys import Keys, divides

STATE_BYTES = 4  # recurrent states are kept in fp32, whatever the KV is kept in; a config can say otherwise
CONV_BYTES = 2


@dataclass(frozen=True)
class Layer:
    """One layer: what it keeps, and its weights."""

    group: Group
    parameters: Parameters

    def with_mlp(self, mlp: Parameters, norms: int) -> Layer:
        return Layer(self.group, self.parameters + mlp + Parameters(norm=norms))


@dataclass(frozen=True)
class Heads:
    """Of softmax attention: Hq, Hkv and d, checked against one another."""

    hidden: int
    query: QueryHeads
    kept: KvHeads
    size: int

    @classmethod
    def read(
        cls, keys: Keys, hidden: int, size: int = 0, *, heads: int | None = None, kept: int | None = None
    ) -> Heads:
        """`size`: of a head where the config does not say; 0: hidden / heads. Raises PlanError."""
        query = keys.integer("num_attention_heads", "heads", heads)
        if keys.has("num_key_value_heads") or kept is not None:
            count = keys.integer("num_key_value_heads", "heads", kept)
        else:
            count = query
            keys.assumed.append(f"num_key_value_heads {query}: the config has none, so every query head has its own")
        divides("num_attention_heads", query, "num_key_value_heads", count)
        if not keys.has("head_dim"):
            if size:
                keys.assumed.append(f"head_dim {size}")
            else:
                divides("hidden_size", hidden, "num_attention_heads", query)
        own = keys.integer("head_dim", "size") if keys.has("head_dim") else size or hidden // query
        return cls(hidden, QueryHeads(query), KvHeads(count), own)

    def layer(
        self,
        *,
        window: int = 0,
        bias: tuple[bool, bool] = (False, False),
        gate: bool = False,
        head_norm: bool = False,
        more: int = 0,
    ) -> Layer:
        """`bias`: of q, k and v, and of the output; `gate`: q has a gate beside it; `head_norm`: q and k have a norm of
        d values; `more`: other weights."""
        asked, held = self.query.count * self.size, self.kept.count * self.size
        weights = self.hidden * (asked * (2 if gate else 1) + 2 * held) + asked * self.hidden + more
        weights += (asked + 2 * held) * bias[0] + self.hidden * bias[1]
        group = attention_group(self.query, self.kept, self.size, self.size, window)
        return Layer(group, Parameters(attention=weights, norm=2 * self.size * head_norm))


@dataclass(frozen=True)
class Latent:
    """Of multi-head latent attention (DeepSeek-V2, section 2.1)."""

    hidden: int
    query: QueryHeads
    q_rank: int
    rank: int
    rope: int
    nope: int
    value: int

    @classmethod
    def read(cls, keys: Keys, hidden: int) -> Latent:
        return cls(
            hidden,
            QueryHeads(keys.integer("num_attention_heads", "heads")),
            keys.integer("q_lora_rank", "size") if keys.has("q_lora_rank") else 0,
            keys.integer("kv_lora_rank", "size"),
            keys.integer("qk_rope_head_dim", "size"),
            keys.integer("qk_nope_head_dim", "size"),
            keys.integer("v_head_dim", "size"),
        )

    def layer(self) -> Layer:
        heads = self.query.count
        asked = heads * (self.nope + self.rope)
        weights = self.hidden * self.q_rank + self.q_rank * asked if self.q_rank else self.hidden * asked
        weights += self.hidden * (self.rank + self.rope) + self.rank * heads * (self.nope + self.value)
        weights += heads * self.value * self.hidden
        group = latent_group(self.query, self.rank, self.rope, self.nope, self.value)
        return Layer(group, Parameters(attention=weights, norm=self.q_rank + self.rank))


def dense(hidden: int, width: int, *, bias: bool = False) -> Parameters:
    """A gated feed-forward layer: gate, up and down."""
    return Parameters(mlp=3 * hidden * width + (2 * width + hidden) * bias)


def experts(hidden: int, width: int, count: int, *, bias: bool = False, router_bias: bool = False) -> Parameters:
    """`count` gated feed-forward layers and what chooses among them."""
    each = 3 * hidden * width + (2 * width + hidden) * bias
    return Parameters(experts=count * each, router=hidden * count + count * router_bias)


def mamba(
    hidden: int, inner: int, state: int, kernel: int, rank: int, *, bias: tuple[bool, bool], norms: bool
) -> Layer:
    """A selective state space layer (Mamba, section 3.4). `bias`: of the convolution, and of the projections."""
    weights = hidden * 2 * inner + inner * kernel + inner * bias[0]
    weights += inner * (rank + 2 * state) + rank * inner + inner
    weights += inner * state + inner + inner * hidden + (2 * inner + hidden) * bias[1]
    held = inner * state * STATE_BYTES + inner * (kernel - 1) * CONV_BYTES
    kept = state_group(inner, inner * state, held)
    return Layer(kept, Parameters(mixer=weights, norm=(rank + 2 * state) * norms))


def mamba2(
    hidden: int, heads: int, size: int, state: int, groups: int, kernel: int, *, bias: tuple[bool, bool]
) -> Layer:
    """A state space layer with one decay for a head (Mamba-2, section 7)."""
    inner = heads * size
    wide = inner + 2 * groups * state
    into = 2 * inner + 2 * groups * state + heads
    weights = hidden * into + wide * kernel + wide * bias[0] + 3 * heads + inner * hidden + (into + hidden) * bias[1]
    held = inner * state * STATE_BYTES + wide * (kernel - 1) * CONV_BYTES
    return Layer(state_group(heads, inner * state, held), Parameters(mixer=weights, norm=inner))


def gated_delta(hidden: int, keys: tuple[int, int], values: tuple[int, int], kernel: int, state_bytes: int) -> Layer:
    """A gated delta rule layer (Yang et al. 2024, section 3). `keys` and `values`: heads and size of each."""
    asked, held = keys[0] * keys[1], values[0] * values[1]
    weights = hidden * (2 * asked + 2 * held) + hidden * 2 * values[0] + (2 * asked + held) * kernel
    weights += 2 * values[0] + held * hidden
    numbers = values[0] * keys[1] * values[1]
    size = numbers * state_bytes + (2 * asked + held) * (kernel - 1) * CONV_BYTES
    return Layer(state_group(keys[0], numbers, size), Parameters(mixer=weights, norm=values[1]))


def short_convolution(hidden: int, kernel: int, *, bias: bool) -> Layer:
    """A gated convolution over the last `kernel` tokens (LFM2)."""
    weights = hidden * 3 * hidden + hidden * kernel + hidden * hidden + (3 * hidden + hidden + hidden) * bias
    return Layer(state_group(hidden, hidden * kernel, hidden * (kernel - 1) * CONV_BYTES), Parameters(mixer=weights))
