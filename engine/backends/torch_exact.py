"""Plain torch operators in exact mode: bits depend on tokens and positions, on nothing else.

Token p is always row p mod 16 of a 16-row tile, keys are padded to the end of the page and masked, sequences are
looped. So every matrix product has the same shape whether a token arrives in a whole prompt, in a chunk, alone, or in a
batch, and a product of one shape rounds in one way. Linear weights are packed once for 16 rows where oneDNN offers
that.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.backends.checks import check_tiles
from engine.backends.face import Logits, Tile
from engine.backends.groups import by_sequence
from engine.backends.memory import pool_memory
from engine.backends.moves import Arrival, HostPages, WholeArrival
from engine.backends.torch_layers import Layer, Rope, as_tensor, linear, normed, packs
from engine.errors import BackendUnavailable
from engine.facts import PAGE_SIZE, BackendIdentity, ModelFacts
from engine.rope import attention_scale, rope_table
from engine.weights import Weights

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PAGE_LAYOUT, _LATENT_LAYOUT = "layer.kv.head.16.d", "layer.16.latent"


class TorchExact(HostPages):
    """A decoder over one pool of KV pages. See `engine.backends.face.Backend`."""

    def __init__(self, facts: ModelFacts, weights: Weights, *, pool_blocks: int, threads: int) -> None:
        if weights.dtype not in _DTYPES:
            raise BackendUnavailable(
                f"the torch backend runs {' and '.join(_DTYPES)}; {weights.dtype} needs the cpu backend"
            )
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._facts = facts
        self._dtype = _DTYPES[weights.dtype]
        self._identity = identity(weights.dtype, threads, facts.mla is not None)
        self._planes = 1 if facts.mla else 2  # a latent is key and value at once
        shape = (pool_blocks, facts.layers, self._planes, facts.kv_heads, PAGE_SIZE, facts.head_size)
        self._page_bytes = facts.page_bytes(weights.dtype)
        self._pool = torch.frombuffer(pool_memory(pool_blocks * self._page_bytes), dtype=self._dtype).view(shape)
        self._runs = self._pool.view(-1, PAGE_SIZE * facts.head_size)  # one run = 16 rows of one head: [runs, 16*d]
        self._bytes = memoryview(_raw(self._pool)).cast("B")
        self._layers = [Layer(facts, weights, layer) for layer in range(facts.layers)]
        self._embed = as_tensor(weights.arrays["embed"])
        self._norm = as_tensor(weights.arrays["norm"])
        head = self._embed if facts.tied_output else as_tensor(weights.arrays["head"])
        self._head = linear(head)
        self._cos, self._sin = (torch.from_numpy(table) for table in rope_table(facts))
        self._scale = attention_scale(facts)
        self._masks: dict[int, Tensor] = {}  # by window

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
            groups = by_sequence(tiles)
            for index, layer in enumerate(self._layers):
                self._attend(index, layer, tiles, hidden, ropes, groups)
                self._feed(layer, hidden)
            return [self._logits(tile, x) if tile.logits_rows else None for tile, x in zip(tiles, hidden, strict=True)]

    # -- one layer ------------------------------------------------------------------------------------------------

    def _attend(
        self,
        index: int,
        layer: Layer,
        tiles: Sequence[Tile],
        hidden: list[Tensor],
        ropes: list[Rope],
        groups: list[list[int]],
    ) -> None:
        queries = []
        for tile, x, rope in zip(tiles, hidden, ropes, strict=True):
            query, rows = layer.attention.project(self._normed(x, layer.attn_norm), rope)
            self._store(index, tile, rows)
            queries.append(query)
        window = self._facts.window(index)
        for group in groups:
            begin = _first_page(tiles[group[0]], window)
            keys, values = self._gather(index, tiles[group[-1]].blocks[begin:])
            for at in group:
                pages = (_first_page(tiles[at], window) - begin, len(tiles[at].blocks) - begin)
                seen = slice(pages[0] * PAGE_SIZE, pages[1] * PAGE_SIZE)
                mixed = self._mix(queries[at], keys[:, seen], values[:, seen], window)
                hidden[at] += layer.o(layer.attention.finish(mixed))

    def _store(self, index: int, tile: Tile, rows: Tensor) -> None:
        live = slice(tile.row, tile.row + len(tile.tokens))
        self._pool[tile.blocks[-1], index, :, :, live] = rows[:, :, live]

    def _gather(self, index: int, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of these pages, contiguous: each [Hkv, 16*P, d]."""
        facts = self._facts
        per_layer = self._planes * facts.kv_heads
        first = torch.tensor(blocks) * (facts.layers * per_layer) + index * per_layer  # [P]
        runs = torch.arange(per_layer)[:, None] + first[None, :]  # [planes*Hkv, P]
        rows = self._runs.index_select(0, runs.view(-1))
        both = rows.view(self._planes, facts.kv_heads, len(blocks) * PAGE_SIZE, facts.head_size)
        return both[0], both[-1]

    def _mix(self, query: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
        """Masked attention of one tile over its padded context: [Hq, 16, d]."""
        facts = self._facts
        mask = self._visible(keys.shape[1], window)
        mixed = functional.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, scale=self._scale
        )
        return mixed[0].view(facts.heads, PAGE_SIZE, facts.head_size)

    def _visible(self, seen: int, window: int) -> Tensor:
        """[G*16, seen]: row g*16+r sees none of the last 15-r keys, and of the others the last `window`; 0: all.

        The end of one wide table, so that it is built once.
        """
        table = self._masks.get(window)
        if table is None or table.shape[1] < seen:
            wide = max(1024, 1 << (seen - 1).bit_length())
            before = torch.arange(PAGE_SIZE)[:, None] + (wide - PAGE_SIZE) - torch.arange(wide)[None, :]
            hidden = (before < 0) | (before >= window if window else False)
            rows = torch.zeros(PAGE_SIZE, wide).masked_fill(hidden, float("-inf"))
            table = rows.repeat(self._facts.heads // self._facts.kv_heads, 1).to(self._dtype)
            self._masks[window] = table
        return table[:, table.shape[1] - seen :]

    def _feed(self, layer: Layer, hidden: list[Tensor]) -> None:
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

    def _rope_rows(self, tile: Tile) -> Rope:
        rows = slice((len(tile.blocks) - 1) * PAGE_SIZE, len(tile.blocks) * PAGE_SIZE)
        return self._cos[rows], self._sin[rows]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return normed(x, weight, self._facts.norm_eps).to(self._dtype)

    def _logits(self, tile: Tile, x: Tensor) -> Logits:
        end = tile.row + len(tile.tokens)
        rows: Logits = self._head(self._normed(x, self._norm))[tile.row : end].float().numpy()
        return rows if tile.all_logits else rows[-1]


def identity(dtype: str, threads: int, latent: bool = False) -> BackendIdentity:
    """What this backend would be called on this machine."""
    products = "packed" if packs(_DTYPES[dtype]) else "plain"
    return BackendIdentity(
        backend="torch",
        mode="exact",
        dtype=dtype,
        page_layout=_LATENT_LAYOUT if latent else _PAGE_LAYOUT,
        instruction_set="/".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), products]),
        threads=threads,
        version=torch.__version__,
    )


def _raw(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor, shared with it."""
    return tensor.view(torch.uint8).numpy()


def _first_page(tile: Tile, window: int) -> int:
    """The first page that any row of the tile's page may see."""
    start = (len(tile.blocks) - 1) * PAGE_SIZE
    return max(0, start - window + 1) // PAGE_SIZE if window else 0
