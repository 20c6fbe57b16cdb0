"""The Triton backend over an account of its streams, with a model in place of its kernels whose rows can be read."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine import drawing, transfers
from engine.backends import gpu_pages, gpu_step, triton
from engine.backends.face import Wish
from engine.backends.gpu_pages import LayerArrival
from engine.backends.gpu_step import StepTensors
from engine.facts import PAGE_SIZE
from engine.sampler import sample
from kvtier import TierStack
from tests.engine.conftest import Loaded
from tests.kernels.ordering import Account, accounted_streams

ROW_WORDS = 8  # of a tiny model's page


class RowModel:
    """A row of a page holds its token, in every layer; the answer is a function of all rows that the tables name."""

    chunk_tokens = PAGE_SIZE

    def __init__(self, account: Account, vocab: int) -> None:
        self.kv_dtype, self._account, self._vocab = torch.bfloat16, account, vocab

    def run(self, step: StepTensors, pool: Tensor, before_layer: Callable[[int], None] | None = None) -> Tensor:
        """As `GpuModel.run`. Reads of tables count as the kernels' own."""
        logits = torch.empty(len(step.wanted), self._vocab)
        for part in dataclasses.fields(step):
            self._account.tensor(getattr(step, part.name), writes=False)
        with _disable_current_modes():
            rows = [row for row, slot in enumerate(step.slot.tolist()) if slot >= 0]
            contexts: dict[int, list[int]] = {}
            for layer in range(pool.shape[1]):
                if before_layer is not None:
                    before_layer(layer)
                for row in rows:
                    self._write(step, pool[:, layer], row)
                contexts = {row: self._read(step, pool[:, layer], row) for row in rows}
            for at, row in enumerate(step.wanted.tolist()):
                if row in contexts:
                    logits[at] = torch.from_numpy(answer(contexts[row], self._vocab))
        self._account.tensor(logits, writes=True)
        return logits

    def _write(self, step: StepTensors, pages: Tensor, row: int) -> None:
        block, at = divmod(int(step.slot[row]), PAGE_SIZE)
        token = int(step.tokens[row])
        for place in pages[block].view(-1, PAGE_SIZE, pages.shape[-1])[:, at]:
            self._account.tensor(place, writes=True)
            place[:2] = torch.tensor([token // 16, token % 16])

    def _read(self, step: StepTensors, pages: Tensor, row: int) -> list[int]:
        tokens: list[int] = []
        count = int(step.context[row])
        for page, block in enumerate(step.tables[int(step.sequence[row]), : -(-count // PAGE_SIZE)].tolist()):
            used = pages[block].view(-1, PAGE_SIZE, pages.shape[-1])[:, : min(PAGE_SIZE, count - page * PAGE_SIZE)]
            self._account.tensor(used, writes=False)
            assert all(torch.equal(used[0, :, :2], copy[:, :2]) for copy in used)
            tokens += (used[0, :, 0] * 16 + used[0, :, 1]).int().tolist()
        return tokens


def answer(tokens: Sequence[int], vocab: int) -> Any:
    digest = hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).digest()
    return np.random.default_rng(list(digest)).standard_normal(vocab).astype(np.float32)


class Drawn:
    """Tokens on the device. Who wants them on the host waits for the stream."""

    def __init__(self, account: Account, logits: Tensor, wishes: Sequence[Wish]) -> None:
        self._account = account
        account.tensor(logits, writes=False)
        rows = zip(logits.numpy(), wishes, strict=True)
        self._tokens = [sample(row, wish.sampling, wish.position, wish.allowed) for row, wish in rows]

    def tolist(self) -> list[int]:
        self._account.wait("compute")
        return self._tokens


class Rerun:
    """In place of CUDA graphs: what was recorded is done again, into the same result."""

    def __init__(self, stream: Any) -> None:
        pass

    def record(self, work: Callable[[], Tensor]) -> Any:
        result = work()
        return SimpleNamespace(result=result, replay=lambda: result.copy_(work()))


def copied(account: Account, source: Tensor, target: Tensor, *at: Tensor | None) -> None:
    """As `copy_pages`, page by page."""
    for index in at:
        if index is not None:
            account.tensor(index, writes=False)
    with _disable_current_modes():
        count = len(next(index for index in at if index is not None))
        froms, tos, rows = (list(range(count)) if index is None else index.tolist() for index in at)
        for one, other, kept in zip(froms, tos, rows, strict=True):
            account.tensor(source[one], writes=False)
            account.tensor(target[other], writes=True)
            row = torch.arange(source.shape[1]) // ROW_WORDS % PAGE_SIZE
            target[other] = torch.where(row < kept, source[one], 0)


def accounted(account: Account, patch: pytest.MonkeyPatch, tiny: Loaded, *, hurries: bool) -> Callable[[int], Any]:
    """Makes backends with so many blocks."""
    weights = tiny.weights("bf16", None)
    assert tiny.facts.head_size * 2 == ROW_WORDS * 8
    patch.setattr(triton, "Streams", lambda _: accounted_streams(account, patch, hurries=hurries))
    patch.setattr(triton, "GpuModel", lambda *_: RowModel(account, tiny.facts.vocab))
    patch.setattr(triton, "CudaGraphs", Rerun)
    patch.setattr(triton, "draw_tokens", lambda logits, wishes: Drawn(account, logits, wishes))
    patch.setattr(gpu_pages, "copy_pages", lambda s, t, f, to, rows, *, shape: copied(account, s, t, f, to, rows))
    pinned, known = gpu_pages._pinned, weakref.WeakSet[Any]()
    send, land, fetch = gpu_step.StepBuffer.send, LayerArrival.land, triton.Triton._fetch

    def sent(buffer: Any) -> None:
        if buffer not in known:
            known.add(buffer)
            account.fresh(buffer._host, of_host=True)  # made by the host, where streams are the GPU's
        account.host(buffer._host.numpy(), writes=True)  # what `fill` has done
        send(buffer)

    def landed(arrival: LayerArrival, layers: int) -> None:
        pages = arrival._pages
        words = pages._words.shape[1] // tiny.facts.layers
        for block in arrival._blocks:
            page = pages._landings.find(block)
            if page is not None:
                account.host(page[len(arrival._launched) * words : layers * words].numpy(), writes=True)
        with account.watching():
            land(arrival, layers)

    def fetched(backend: Any, logits: Tensor) -> Any:
        rows = fetch(backend, logits)
        for row in rows:
            account.host(row, writes=False)
        return rows

    def pinning(*shape: Any) -> Tensor:
        memory = pinned(*shape)
        account.fresh(memory, of_host=True)
        return memory

    patch.setattr(gpu_pages, "_CHUNK_PAGES", 2)  # so that landings are soon used again
    patch.setattr(gpu_pages, "_pinned", pinning)
    patch.setattr(gpu_step.StepBuffer, "send", sent)
    patch.setattr(LayerArrival, "land", landed)
    patch.setattr(triton.Triton, "_fetch", fetched)
    return lambda blocks: triton.Triton(tiny.facts, weights, pool_blocks=blocks)


def watch_tiers(account: Account, patch: pytest.MonkeyPatch) -> None:
    """What readers and writers of tiers do to host memory. Whole pages are written before they are scattered; those
    that come layer by layer, before they land."""
    read, put = transfers._read, TierStack.put

    def reading(stack: Any, rooms: Any, staged: Any) -> Any:
        for key, room in rooms:
            account.host(room, writes=True)
            if key in staged:
                staged[key].ready.wait()
                account.host(staged[key].page, writes=False)
        return read(stack, rooms, staged)

    def putting(stack: TierStack, pages: Any, **named: Any) -> Any:
        for _, page in pages:
            account.host(page, writes=False)
        return put(stack, pages, **named)

    def sampling(logits: Any, *rest: Any) -> Any:
        account.host(logits, writes=False)
        return sample(logits, *rest)

    patch.setattr(transfers, "_read", reading)
    patch.setattr(TierStack, "put", putting)
    patch.setattr(drawing, "sample", sampling)
