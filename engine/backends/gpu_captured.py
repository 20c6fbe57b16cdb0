"""Decode steps of the GPU, recorded once per bucket of rows and of pages, and replayed.

A bucket's buffers are static. Rows that a step does not fill are padding: their slot is -1, so nothing is written, and
their context is empty, so nothing is seen. The bits of a row are the same in every bucket, since every kernel's are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.backends.face import Logits, Tile
from engine.backends.gpu_step import StepBuffer, StepShape, StepTensors
from engine.backends.graphs import CudaGraphs, Recordings
from engine.backends.groups import lone_tokens

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # rows; larger decode steps run as any other
_FIRST_PAGES = 64
_GROWTH = 4

Fetch = Callable[[Tensor], Logits]


class CapturedStep:
    """See `engine.backends.face.CapturedStep`."""

    def __init__(self, batch: int, pages: int, device: torch.device) -> None:
        self.batch, self.pages = batch, pages
        self._buffer = StepBuffer(StepShape(batch, batch, batch, pages, 0, batch), device)
        self._buffer.on_host.wanted.copy_(torch.arange(batch))
        self._fetch: Fetch | None = None

    def record(self, recorder: CudaGraphs | Recordings, run: Callable[[StepTensors], Tensor], fetch: Fetch) -> None:
        self._buffer.fill_decodes([])
        self._buffer.send()
        self._graph = recorder.record(lambda: run(self._buffer.on_device))
        self._fetch = fetch

    def launch(self, tiles: Sequence[Tile]) -> Tensor:
        """Logits on the device, [tiles, vocab]."""
        self._buffer.fill_decodes(tiles)
        self._buffer.send()
        self._graph.replay()
        return self._graph.result[: len(tiles)]

    def replay(self, tiles: Sequence[Tile]) -> list[Logits]:
        assert self._fetch is not None
        return list(self._fetch(self.launch(tiles)))


class CapturedSteps:
    """By bucket. `captures` counts all that were recorded, `replays` those that were there."""

    def __init__(
        self, recorder: CudaGraphs | Recordings, run: Callable[[StepTensors], Tensor], fetch: Fetch,
        device: torch.device, most_pages: int,
    ) -> None:  # fmt: skip
        self._recorder, self._run, self._fetch = recorder, run, fetch
        self._device, self._most_pages = device, most_pages
        self._steps: dict[tuple[int, int], CapturedStep] = {}
        self.captures = self.replays = 0

    def for_rows(self, rows: int, pages: int) -> CapturedStep:
        """The smallest step with so many rows of so many pages."""
        assert rows <= BUCKETS[-1]
        batch = next(bucket for bucket in BUCKETS if bucket >= rows)
        room = min(_FIRST_PAGES, self._most_pages)
        while room < pages:
            room = min(room * _GROWTH, max(self._most_pages, pages))
        step = self._steps.get((batch, room))
        if step is None:
            step = CapturedStep(batch, room, self._device)
            step.record(self._recorder, self._run, self._fetch)
            self._steps[batch, room] = step
            self.captures += 1
        else:
            self.replays += 1
        return step

    def record_all(self) -> None:
        """Every bucket of rows for contexts of usual length, the largest first: the others fit into its memory."""
        for rows in reversed(BUCKETS):
            self.for_rows(rows, 1)


def is_decode(tiles: Sequence[Tile]) -> bool:
    """Whether a step is one that is captured."""
    return lone_tokens(tiles, BUCKETS[-1])
