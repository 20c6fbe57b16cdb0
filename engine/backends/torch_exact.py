"""Plain torch operators in exact mode: bits depend on tokens and positions, on nothing else.

Token p is always row p mod 16 of a 16-row tile, keys are padded to the end of the page and masked, sequences are
looped. So every matrix product has the same shape whether a token arrives in a whole prompt, in a chunk, alone, or in a
batch, and a product of one shape rounds in one way. Linear weights are packed once for 16 rows where oneDNN offers
that.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.backends.checks import check_tiles
from engine.backends.face import Logits, Tile
from engine.backends.memory import pool_memory
from engine.backends.moves import Arrival, HostPages, WholeArrival
from engine.errors import BackendUnavailable
from engine.facts import PAGE_SIZE, BackendIdentity, ModelFacts
from engine.rope import rope_table
from engine.weights import Weights

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PAGE_LAYOUT = "layer.kv.head.16.d"

Linear = Callable[[Tensor], Tensor]


class TorchExact(HostPages):
    """A llama or qwen2 decoder over one pool of KV pages. See `engine.backends.face.Backend`."""

    def __init__(self, facts: ModelFacts, weights: Weights, *, pool_blocks: int, threads: int) -> None:
        if weights.dtype not in _DTYPES:
            raise BackendUnavailable(
                f"the torch backend runs {' and '.join(_DTYPES)}; {weights.dtype} needs the cpu backend"
            )
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._facts = facts
        self._dtype = _DTYPES[weights.dtype]
        self._identity = identity(weights.dtype, threads)
        shape = (pool_blocks, facts.layers, 2, facts.kv_heads, PAGE_SIZE, facts.head_size)
        self._page_bytes = facts.page_bytes(weights.dtype)
        self._pool = torch.frombuffer(pool_memory(pool_blocks * self._page_bytes), dtype=self._dtype).view(shape)
        self._runs = self._pool.view(-1, PAGE_SIZE * facts.head_size)  # one run = 16 rows of one head: [runs, 16*d]
        self._bytes = memoryview(_raw(self._pool)).cast("B")
        self._layers = [_Layer(weights, layer) for layer in range(facts.layers)]
        self._embed = _tensor(weights.arrays["embed"])
        self._norm = _tensor(weights.arrays["norm"])
        head = self._embed if facts.tied_output else _tensor(weights.arrays["head"])
        self._head = _linear(head)
        self._cos, self._sin = (torch.from_numpy(table) for table in rope_table(facts))
        self._mask = torch.zeros(0, 0)

    @property
    def identity(self) -> BackendIdentity:
        return self._identity

    def page(self, block: int) -> memoryview:
        return self._bytes[block * self._page_bytes : (block + 1) * self._page_bytes]

    @property
    def layers(self) -> int:
        return self._facts.layers

    def expect(self, blocks: Sequence[int]) -> Arrival:
        return WholeArrival(self._facts.layers)

    def zero(self, block: int) -> None:
        self._pool[block].zero_()

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self._pool[target].zero_()
        self._pool[target, ..., :rows, :] = self._pool[source, ..., :rows, :]

    def snapshot(self, block: int, rows: int) -> bytes:
        if rows == PAGE_SIZE:
            return bytes(self.page(block))
        page = self._pool[block].clone()
        page[..., rows:, :] = 0
        return bytes(_raw(page))

    def forward(self, tiles: Sequence[Tile], arrival: Arrival | None = None) -> list[Logits | None]:
        if isinstance(arrival, WholeArrival):
            arrival.wait()
        check_tiles(tiles, self._facts, len(self._pool))
        with torch.inference_mode():
            hidden = [self._embed_tile(tile) for tile in tiles]  # each [16, H] fp32
            ropes = [self._rope_rows(tile) for tile in tiles]
            groups = _by_sequence(tiles)
            for index, layer in enumerate(self._layers):
                self._attend(index, layer, tiles, hidden, ropes, groups)
                self._feed(layer, hidden)
            return [self._logits(tile, x) if tile.wants_logits else None for tile, x in zip(tiles, hidden, strict=True)]

    # -- one layer ------------------------------------------------------------------------------------------------

    def _attend(
        self,
        index: int,
        layer: _Layer,
        tiles: Sequence[Tile],
        hidden: list[Tensor],
        ropes: list[tuple[Tensor, Tensor]],
        groups: list[list[int]],
    ) -> None:
        queries = []
        for tile, x, rope in zip(tiles, hidden, ropes, strict=True):
            query, key, value = self._project(layer, x, rope)
            self._store(index, tile, key, value)
            queries.append(query)
        for group in groups:
            keys, values = self._gather(index, tiles[group[-1]].blocks)
            for at in group:
                seen = len(tiles[at].blocks) * PAGE_SIZE
                mixed = self._mix(queries[at], keys[:, :seen], values[:, :seen])
                hidden[at] += layer.o(mixed)

    def _project(self, layer: _Layer, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Query [Hkv, G*16, d], key and value [Hkv, 16, d], all in the model's dtype."""
        facts = self._facts
        fused = layer.qkv(self._normed(x, layer.attn_norm)).float()
        if layer.qkv_bias is not None:
            fused += layer.qkv_bias
        heads = fused.view(PAGE_SIZE, facts.heads + 2 * facts.kv_heads, facts.head_size).transpose(0, 1)
        turned = _rotate(heads[: facts.heads + facts.kv_heads], *rope).to(self._dtype)
        query = turned[: facts.heads].reshape(facts.kv_heads, -1, facts.head_size)
        return query, turned[facts.heads :], heads[facts.heads + facts.kv_heads :].to(self._dtype)

    def _store(self, index: int, tile: Tile, key: Tensor, value: Tensor) -> None:
        rows = slice(tile.row, tile.row + len(tile.tokens))
        page = self._pool[tile.blocks[-1], index]  # [2, Hkv, 16, d]
        page[0, :, rows] = key[:, rows]
        page[1, :, rows] = value[:, rows]

    def _gather(self, index: int, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of pages 0..j, contiguous: each [Hkv, 16*(j+1), d]."""
        facts = self._facts
        per_layer = 2 * facts.kv_heads
        first = torch.tensor(blocks) * (facts.layers * per_layer) + index * per_layer  # [P]
        runs = torch.arange(per_layer)[:, None] + first[None, :]  # [2*Hkv, P]
        rows = self._runs.index_select(0, runs.view(-1))
        both = rows.view(2, facts.kv_heads, len(blocks) * PAGE_SIZE, facts.head_size)
        return both[0], both[1]

    def _mix(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Masked attention of one tile over its padded context: [16, Hq*d]."""
        facts = self._facts
        mask = self._causal(keys.shape[1])
        mixed = functional.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask)
        return mixed[0].view(facts.heads, PAGE_SIZE, facts.head_size).transpose(0, 1).reshape(PAGE_SIZE, -1)

    def _causal(self, seen: int) -> Tensor:
        """[G*16, seen]: row g*16+r sees all but the last 15-r keys.

        The end of one wide table, so that it is built once.
        """
        if self._mask.shape[1] < seen:
            wide = max(1024, 1 << (seen - 1).bit_length())
            block = torch.full((PAGE_SIZE, PAGE_SIZE), float("-inf")).triu(1)
            table = torch.cat([torch.zeros(PAGE_SIZE, wide - PAGE_SIZE), block], dim=1)
            self._mask = table.repeat(self._facts.heads // self._facts.kv_heads, 1).to(self._dtype)
        return self._mask[:, self._mask.shape[1] - seen :]

    def _feed(self, layer: _Layer, hidden: list[Tensor]) -> None:
        gated = []
        for x in hidden:
            both = layer.gate_up(self._normed(x, layer.ffn_norm))  # [16, 2F]
            gate, up = both.chunk(2, dim=1)
            gated.append(functional.silu(gate.contiguous()).mul_(up))
        for at, value in enumerate(gated):
            hidden[at] += layer.down(value)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _embed_tile(self, tile: Tile) -> Tensor:
        ids = [0] * PAGE_SIZE
        ids[tile.row : tile.row + len(tile.tokens)] = tile.tokens
        return self._embed.index_select(0, torch.tensor(ids)).float()

    def _rope_rows(self, tile: Tile) -> tuple[Tensor, Tensor]:
        rows = slice((len(tile.blocks) - 1) * PAGE_SIZE, len(tile.blocks) * PAGE_SIZE)
        return self._cos[rows], self._sin[rows]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[1],), weight, self._facts.norm_eps).to(self._dtype)

    def _logits(self, tile: Tile, x: Tensor) -> Logits:
        row = tile.row + len(tile.tokens) - 1
        out: Logits = self._head(self._normed(x, self._norm))[row].float().numpy()
        return out


class _Layer:
    """The weights of one layer, linear ones as callables [16, in] -> [16, out]."""

    def __init__(self, weights: Weights, layer: int) -> None:
        def named(name: str) -> Tensor:
            return _tensor(weights.arrays[f"{layer}.{name}"])

        self.attn_norm = named("attn_norm")
        self.ffn_norm = named("ffn_norm")
        self.qkv = _linear(named("qkv"))
        self.qkv_bias = named("qkv_bias") if f"{layer}.qkv_bias" in weights.arrays else None
        self.o = _linear(named("o"))
        self.gate_up = _linear(named("gate_up"))
        self.down = _linear(named("down"))


def identity(dtype: str, threads: int) -> BackendIdentity:
    """What this backend would be called on this machine."""
    linear = "packed" if _packs(_DTYPES[dtype]) else "plain"
    return BackendIdentity(
        backend="torch",
        mode="exact",
        dtype=dtype,
        page_layout=_PAGE_LAYOUT,
        instruction_set="/".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), linear]),
        threads=threads,
        version=torch.__version__,
    )


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN can pack linear weights here; those in bf16 it packs on some processors only."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _linear(weight: Tensor) -> Linear:
    """A product with a fixed weight, packed for 16 rows where oneDNN can."""
    if _packs(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PAGE_SIZE)
        pointwise = torch.ops.mkldnn._linear_pointwise
        return lambda x: _as_tensor(pointwise(x, packed, None, "none", [], ""))
    return lambda x: functional.linear(x, weight)


def _as_tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _raw(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor, shared with it."""
    return tensor.view(torch.uint8).numpy()


def _tensor(value: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
    """A torch view of an array; uint16 arrays are bf16 bit patterns."""
    tensor = torch.from_numpy(value)
    return tensor.view(torch.bfloat16) if value.dtype == np.uint16 else tensor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves: x [heads, 16, d], cos and sin [16, d/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _by_sequence(tiles: Sequence[Tile]) -> list[list[int]]:
    """Indices of tiles, those of one sequence together: a later tile's blocks begin with an earlier one's."""
    groups: list[list[int]] = []
    for at, tile in enumerate(tiles):
        last = tiles[groups[-1][-1]].blocks if groups else ()
        if last and tile.blocks[: len(last)] == last and len(tile.blocks) > len(last):
            groups[-1].append(at)
        else:
            groups.append([at])
    return groups
