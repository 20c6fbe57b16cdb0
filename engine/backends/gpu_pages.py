"""The pool of KV pages on a GPU, and the way between it and host memory.

A page is one piece: [layer][k, v][head][16][d], or [layer][16][latent] with MLA. So a page, or a range of its layers,
comes in by one copy from pinned memory, without a kernel. Pages go out through a kernel that collects them, with the
rows that carry nothing set to zero; after it their blocks may be written again, while the copy to the host runs.

    out   compute: collect -> outward: copy to pinned memory -> `Copied.ready`
    in    inward, after what compute had to do with the block: copy from its landing -> compute waits before it reads
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.backends.gpu_streams import Streams
from engine.backends.moves import DONE, Copied, Moved
from engine.errors import ArrivalFailed
from engine.facts import PAGE_SIZE, ModelFacts
from engine.kernels.copy_pages import PageShape, copy_pages

_ALIGN = 4096  # what a disk can write by itself
_CHUNK_PAGES = 16  # landings are pinned this many at a time: pinning is slow


class GpuPages:
    """See `MovesPages`. `layers` is the pool as steps see it: [blocks, layer, 2, Hkv, 16, d] or [blocks, layer, 16, d],
    in the model's type or in e4m3.

    Everything but landings' memory and `LayerArrival.land` is used by the thread that steps the backend.
    """

    def __init__(
        self, facts: ModelFacts, dtype: torch.dtype, blocks: int, device: torch.device, streams: Streams
    ) -> None:
        self._streams, self._device, self._layer_count = streams, device, facts.layers
        inner = (PAGE_SIZE, facts.head_size)
        shape = (facts.layers, *inner) if facts.mla else (facts.layers, 2, facts.kv_heads, *inner)
        words = math.prod(shape) * dtype.itemsize // 8
        self._words = torch.zeros(blocks, words, dtype=torch.int64, device=device)  # [blocks, 8-byte words]
        self.layers = self._words.view(dtype).view(blocks, *shape)
        self.page_bytes = self._words.shape[1] * 8
        self._shape = PageShape(facts.head_size * dtype.itemsize // 8, PAGE_SIZE)
        self._landings = _Landings(self._words.shape[1], device)
        self._staging: dict[int, list[Tensor]] = {1: [], _CHUNK_PAGES: []}  # pinned [pages, words], free, by pages
        self._arrived: Moved = DONE  # the last copy that was launched inward; those before it end before it
        self._launching = threading.Lock()

    # -- single pages ---------------------------------------------------------------------------------------------

    def zero(self, block: int) -> None:
        self._landings.free(block, self._arrived)  # an arrival that failed may have begun to copy from there
        with self._on_compute():
            self._words[block].zero_()

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        with self._on_compute():
            there = self._on_device([source], [target], [rows])
            copy_pages(self._words, self._words, there[0], there[1], there[2], shape=self._shape)

    def snapshot(self, block: int, rows: int) -> bytes:
        copied = self.gather([(block, rows)])
        copied.ready.wait()
        return bytes(copied.pages[0])

    # -- out ------------------------------------------------------------------------------------------------------

    def gather(self, pages: Sequence[tuple[int, int]]) -> Copied:
        views: list[memoryview] = []
        for at in range(0, len(pages), _CHUNK_PAGES):
            views += self._collect(pages[at : at + _CHUNK_PAGES])
        return Copied(views, self._streams.moment(self._streams.outward))

    def _collect(self, pages: Sequence[tuple[int, int]]) -> list[memoryview]:
        streams = self._streams
        with self._on_compute():
            there = self._on_device(*zip(*pages, strict=True))
            collected = torch.empty(len(pages), self._words.shape[1], dtype=torch.int64, device=self._device)
            copy_pages(self._words, collected, there[0], None, there[1], shape=self._shape)
            collected_all = streams.moment(streams.compute)
        free = self._staging[1 if len(pages) == 1 else _CHUNK_PAGES]
        host = free.pop() if free else self._fresh(1 if len(pages) == 1 else _CHUNK_PAGES)
        streams.after(streams.outward, collected_all)
        with streams.on(streams.outward):
            host[: len(pages)].copy_(collected, non_blocking=True)
        if streams.cuda:
            collected.record_stream(streams.outward)
        array = host.view(torch.uint8).numpy()
        weakref.finalize(array, free.append, host)  # free again when nobody holds a page of it
        return [memoryview(array[i]) for i in range(len(pages))]

    def _on_device(self, *rows: Sequence[int]) -> Tensor:
        """int32 [rows, N]. From pinned memory: from any other the copy would wait for the stream, and so for pages that
        come in."""
        index = torch.empty(len(rows), len(rows[0]), dtype=torch.int32, pin_memory=self._streams.cuda)
        index.numpy()[:] = rows
        return index.to(self._device, non_blocking=True)

    def _fresh(self, pages: int) -> Tensor:
        return _pinned(pages, self._words.shape[1], self._device)

    # -- in -------------------------------------------------------------------------------------------------------

    def landing(self, block: int) -> memoryview:
        return self._landings.take(block)

    def scatter(self, blocks: Sequence[int], layers: range | None = None) -> Moved:
        """Blocks whose landings are gone have been scattered already."""
        streams = self._streams
        streams.after(streams.inward, streams.moment(streams.compute))
        return self.bring(blocks, range(self._layer_count) if layers is None else layers)

    def bring(self, blocks: Sequence[int], layers: range) -> Moved:
        """Launch the copies of these layers. The inward stream must be after whatever else was done to the blocks.
        Any thread may."""
        streams, words = self._streams, self._words.shape[1] // self._layer_count
        part = slice(layers.start * words, layers.stop * words)
        with self._launching, streams.on(streams.inward):
            for block in blocks:
                landing = self._landings.find(block)
                if landing is not None:
                    self._words[block, part].copy_(landing[part], non_blocking=True)
            moment = self._arrived = streams.moment(streams.inward)
        if layers.stop == self._layer_count:
            for block in blocks:
                self._landings.free(block, moment)
        return moment

    def expect(self, blocks: Sequence[int]) -> LayerArrival:
        self._streams.after(self._streams.inward, self._streams.moment(self._streams.compute))
        return LayerArrival(self, blocks, self._layer_count)

    @contextlib.contextmanager
    def _on_compute(self) -> Iterator[None]:
        self.before_step()
        with self._streams.on(self._streams.compute):
            yield

    def before_step(self) -> None:
        """What is launched from now on comes after the copies that were launched inward."""
        self._streams.after(self._streams.compute, self._arrived)

    def before_layer(self, arrival: LayerArrival, layer: int) -> None:
        """Blocks until a layer's copies are launched. Raises ArrivalFailed."""
        self._streams.after(self._streams.compute, arrival.wait_for(layer))


class LayerArrival:
    """See `Arrival`: copies to the device are launched as layers land, and the step waits for them one by one."""

    def __init__(self, pages: GpuPages, blocks: Sequence[int], layers: int) -> None:
        self._pages, self._blocks, self._layers = pages, list(blocks), layers
        self._launched: list[Moved] = []  # by layer
        self._failed = False
        self._changed = threading.Condition()

    def land(self, layers: int) -> None:
        with self._changed:
            fresh = range(len(self._launched), layers)
            if fresh and not self._failed:
                self._launched += [self._pages.bring(self._blocks, fresh)] * len(fresh)
                self._changed.notify_all()

    def fail(self) -> None:
        with self._changed:
            self._failed = self._failed or len(self._launched) < self._layers
            self._changed.notify_all()

    def wait_for(self, layer: int) -> Moved:
        """When this layer's copies are done. Raises ArrivalFailed where they do not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or layer < len(self._launched))
            if layer >= len(self._launched):
                raise ArrivalFailed("pages that a step was to read did not come")
            return self._launched[layer]


class _Landings:
    """Pinned pages, each a block's from `take` until `free`. Used by several threads."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._words, self._device = words, device
        self._free: list[tuple[Tensor, Moved]] = []  # and when the last copy out of it ends
        self._taken: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def take(self, block: int) -> memoryview:
        with self._lock:
            page = self._taken.get(block)
            if page is None:
                at = next((i for i, (_, moment) in enumerate(self._free) if moment.done()), None)
                if at is None:
                    at = len(self._free)
                    self._free += [(row, DONE) for row in _pinned(_CHUNK_PAGES, self._words, self._device)]
                page = self._taken[block] = self._free.pop(at)[0]
            return memoryview(page.view(torch.uint8).numpy())  # type: ignore[arg-type]

    def find(self, block: int) -> Tensor | None:
        with self._lock:
            return self._taken.get(block)

    def free(self, block: int, moment: Moved) -> None:
        with self._lock:
            page = self._taken.pop(block, None)
            if page is not None:
                self._free.append((page, moment))


def _pinned(pages: int, words: int, device: torch.device) -> Tensor:
    """int64 [pages, words] of host memory, the first page where a disk can write by itself."""
    if device.type == "cuda":
        return torch.empty(pages, words, dtype=torch.int64, pin_memory=True)  # a whole allocation: aligned
    raw = np.empty(pages * words * 8 + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return torch.from_numpy(raw[start : start + pages * words * 8]).view(torch.int64).view(pages, words)
