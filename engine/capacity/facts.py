"""What of a model decides its memory and its speed: parameters by kind, and what a session leaves in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

Kind = Literal["growing", "windowed", "state"]


@dataclass(frozen=True)
class QueryHeads:
    """How many heads ask. They decide what attention computes, and nothing of what it keeps."""

    count: int

    def pair_flops(self, key_size: int, value_size: int) -> int:
        """FLOP for one token that looks at one other: a multiply and an add for each number of a key and a value."""
        return 2 * self.count * (key_size + value_size)


@dataclass(frozen=True)
class KvHeads:
    """How many heads are kept. Only they can say how many numbers a token leaves, so that query heads, of which a
    70B-class model has eight times as many, cannot be taken for them."""

    count: int

    def row_numbers(self, key_size: int, value_size: int) -> int:
        """Numbers that a token leaves in one layer: Hkv x (dk + dv), usually 2 x Hkv x d."""
        return self.count * (key_size + value_size)


@dataclass(frozen=True)
class Group:
    """Layers that keep the same of a session.

    growing: a row for every token; windowed: rows of the last `window` tokens; state: `state_bytes`, however long the
    session is. `row_numbers` are of one token in one layer, `shards` into how many parts a row (or a state) can be cut
    by tensor parallelism: beyond that it is replicated. `decode_flops` and `prefill_flops` are of one token that looks
    at one other in one layer; they differ where a latent row is unpacked for a prompt and is not for a single token.
    `token_flops`: of one token in a state layer.
    """

    kind: Kind
    layers: int
    row_numbers: int = 0
    shards: int = 1
    window: int = 0
    decode_flops: int = 0
    prefill_flops: int = 0
    state_bytes: int = 0
    token_flops: int = 0


def attention_group(query: QueryHeads, kept: KvHeads, key_size: int, value_size: int, window: int = 0) -> Group:
    """One layer of multi-head, grouped-query or multi-query attention; `window` 0: it sees everything."""
    if not isinstance(query, QueryHeads) or not isinstance(kept, KvHeads):
        raise TypeError("query heads and KV heads are two things; give QueryHeads and KvHeads")
    flops = query.pair_flops(key_size, value_size)
    return Group(
        kind="windowed" if window else "growing",
        layers=1,
        row_numbers=kept.row_numbers(key_size, value_size),
        shards=kept.count,
        window=window,
        decode_flops=flops,
        prefill_flops=flops,
    )


def latent_group(query: QueryHeads, rank: int, rope: int, nope: int, value: int) -> Group:
    """One layer of MLA (DeepSeek-V2, section 2.1): a latent row and one rotated key, whole on every device."""
    return Group(
        kind="growing",
        layers=1,
        row_numbers=rank + rope,
        decode_flops=query.pair_flops(rank + rope, rank),
        prefill_flops=query.pair_flops(nope + rope, value),
    )


def state_group(heads: int, numbers: int, kept_bytes: int) -> Group:
    """One layer that keeps a state of `numbers` numbers in `kept_bytes`; `heads` is into how many parts it divides."""
    return Group(kind="state", layers=1, shards=heads, state_bytes=kept_bytes, token_flops=6 * numbers)


def grouped(layers: Sequence[Group]) -> tuple[Group, ...]:
    """The groups of single layers, alike ones counted together, in the order in which they first come."""
    counted: dict[Group, int] = {}
    for layer in layers:
        counted[layer] = counted.get(layer, 0) + 1
    return tuple(replace(layer, layers=count) for layer, count in counted.items())


@dataclass(frozen=True)
class Parameters:
    """How many weights there are of each kind. `embedding` is the table, `head` 0 where the two are one."""

    embedding: int = 0
    head: int = 0
    attention: int = 0
    mixer: int = 0
    mlp: int = 0
    experts: int = 0
    router: int = 0
    norm: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def times(self, count: int) -> Parameters:
        return Parameters(*(getattr(self, one.name) * count for one in fields(self)))

    @property
    def total(self) -> int:
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True)
class Experts:
    """Routed experts: of `count` in each of `layers` layers a token goes to `active`. `width` is what it takes there,
    the hidden size."""

    count: int
    active: int
    layers: int
    width: int


@dataclass(frozen=True)
class ModelFacts:
    """A decoder, as planning needs it.

    `degrees`: what tensor parallelism has to divide, by name. `weights`: of `engine.capacity.numbers`, as the
    checkpoint has them; `expert_weights`: of the routed experts, where those differ. `file_bytes`: of the tensors of a
    GGUF file, whose own formats are kept; 0: none. `assumed`: what its config did not say.
    """

    name: str
    family: str
    layers: int
    hidden: int
    query_heads: QueryHeads
    kv_heads: KvHeads
    context: int
    vocab: int
    groups: tuple[Group, ...]
    parameters: Parameters
    experts: Experts | None = None
    degrees: tuple[tuple[str, int], ...] = ()
    weights: str = "bf16"
    expert_weights: str = ""
    file_bytes: int = 0
    assumed: tuple[str, ...] = field(default=(), compare=False)

    @property
    def active(self) -> int:
        """Parameters that one token meets: all but the experts that it does not go to."""
        return self.parameters.total - self.parameters.experts + self.active_experts

    @property
    def active_experts(self) -> int:
        one = self.experts
        return self.parameters.experts * one.active // one.count if one else 0
