"""The GPU backend: one decoder in Triton kernels over a pool of KV pages in device memory.

Bits depend on tokens and positions, on nothing else: see `engine.kernels`. Where TRITON_INTERPRET=1 is set the same
backend runs in Triton's interpreter, on the CPU and slowly: streams and graphs have stand-ins there, all else is the
same.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
import triton
from torch import Tensor

from engine import kernels
from engine.backends import gpu_model, gpu_weights
from engine.backends.checks import check_tiles
from engine.backends.face import CapturedStep, Logits, Tile, Wish, shared_out
from engine.backends.gpu_captured import CapturedSteps, is_decode
from engine.backends.gpu_device import check_memory, open_device
from engine.backends.gpu_draw import draw_tokens
from engine.backends.gpu_model import DTYPES, GpuModel, check_model
from engine.backends.gpu_pages import GpuPages, LayerArrival
from engine.backends.gpu_step import StepBuffer, StepTensors, lay_out
from engine.backends.gpu_streams import Streams
from engine.backends.gpu_weights import device_bytes
from engine.backends.graphs import CudaGraphs, Recordings
from engine.backends.moves import Arrival, Copied, Moved
from engine.errors import BackendUnavailable
from engine.facts import PAGE_SIZE, BackendIdentity, ModelFacts
from engine.kernels.target import INTERPRETED, arch
from engine.precision import QUANTISED, Precision
from engine.weights import Weights


class Triton:
    """See `engine.backends.face.Backend`. Raises BackendUnavailable, and RequestError where memory is too small."""

    overlaps = True

    def __init__(
        self, facts: ModelFacts, weights: Weights, *, pool_blocks: int, precision: Precision | None = None
    ) -> None:
        if weights.dtype not in DTYPES:
            raise BackendUnavailable(
                f"the triton backend runs {', '.join((*DTYPES, *QUANTISED))}; {weights.dtype} needs the cpu backend"
            )
        precision = precision or Precision(weights.dtype)
        assert precision.loaded == weights.dtype
        device = open_device()
        check_model(facts, precision)
        check_memory(device, facts, pool_blocks, device_bytes(weights, precision), precision)
        torch.set_grad_enabled(False)
        if INTERPRETED:
            from engine.kernels import interpreter  # it needs ml-dtypes, which a GPU does not

            interpreter.apply()
        self._facts, self._pool_blocks, self._device = facts, pool_blocks, device
        self._identity = identity(precision, facts)
        self._streams = Streams(device)
        with self._streams.on(self._streams.compute):
            self._model = GpuModel(facts, weights, precision, device)
            self._pages = GpuPages(facts, self._model.kv_dtype, pool_blocks, device, self._streams)
        self._host = torch.empty(0, facts.vocab)
        self._drawn_from: Tensor | None = None
        most = min(pool_blocks, -(-facts.context // PAGE_SIZE))
        recorder = CudaGraphs(self._streams.compute) if self._streams.cuda else Recordings()
        self._captured = CapturedSteps(recorder, self._run, self._fetch, device, most)
        if self._streams.cuda:
            self._captured.record_all()

    @property
    def layers(self) -> int:
        return self._facts.layers

    @property
    def identity(self) -> BackendIdentity:
        return self._identity

    @property
    def replays(self) -> int:
        return self._captured.replays

    def device_memory(self) -> tuple[int, int] | None:
        """See `engine.memory_use.HasDevice`."""
        if not self._streams.cuda:
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free, total

    # -- pages ----------------------------------------------------------------------------------------------------

    def zero(self, block: int) -> None:
        self._pages.zero(block)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        self._pages.copy_rows(source, target, rows)

    def snapshot(self, block: int, rows: int) -> bytes:
        return self._pages.snapshot(block, rows)

    def gather(self, pages: Sequence[tuple[int, int]]) -> Copied:
        return self._pages.gather(pages)

    def landing(self, block: int) -> memoryview:
        return self._pages.landing(block)

    def scatter(self, blocks: Sequence[int], layers: range | None = None) -> Moved:
        return self._pages.scatter(blocks, layers)

    def expect(self, blocks: Sequence[int]) -> Arrival:
        return self._pages.expect(blocks)

    # -- steps ----------------------------------------------------------------------------------------------------

    def forward(self, tiles: Sequence[Tile], arrival: Arrival | None = None) -> list[Logits | None]:
        check_tiles(tiles, self._facts, self._pool_blocks)
        with torch.inference_mode(), self._streams.on(self._streams.compute):
            return shared_out(self._fetch(self._step(tiles, arrival)), tiles)

    def draw(self, tiles: Sequence[Tile], wishes: Sequence[Wish]) -> list[int]:
        """See `engine.backends.face.DrawsTokens`."""
        check_tiles(tiles, self._facts, self._pool_blocks)
        with torch.inference_mode(), self._streams.on(self._streams.compute):
            logits = self._drawn_from = self._step(tiles, None)
            if wishes:
                tokens: list[int] = draw_tokens(logits, wishes).tolist()
                return tokens
            self._streams.finish(self._streams.compute)  # a step is over when it returns: it is clocked
            return []

    def rows(self, wanted: Sequence[int]) -> list[Logits]:
        """See `engine.backends.face.DrawsTokens`."""
        assert self._drawn_from is not None
        with torch.inference_mode(), self._streams.on(self._streams.compute):
            there = torch.tensor(list(wanted), device=self._drawn_from.device)
            return list(self._fetch(self._drawn_from.index_select(0, there)))

    def capture(self, batch: int) -> CapturedStep:
        with torch.inference_mode(), self._streams.on(self._streams.compute):
            return self._captured.for_rows(batch, 1)

    def _step(self, tiles: Sequence[Tile], arrival: Arrival | None) -> Tensor:
        """Launch a step. Logits on the device, of the tiles that want them."""
        self._pages.before_step()
        if is_decode(tiles) and arrival is None:
            pages = max(len(tile.blocks) for tile in tiles)
            return self._captured.for_rows(len(tiles), pages).launch(tiles)
        return self._eager(tiles, arrival if isinstance(arrival, LayerArrival) else None)

    def _eager(self, tiles: Sequence[Tile], arrival: LayerArrival | None) -> Tensor:
        """As `_step`, kernel by kernel."""
        layout = lay_out(tiles, self._model.chunk_tokens)
        buffer = StepBuffer(layout.shape, self._device)
        buffer.fill(layout, tiles)
        buffer.send()
        waits = None if arrival is None else lambda layer: self._pages.before_layer(arrival, layer)
        return self._model.run(buffer.on_device, self._pages.layers, waits)

    def _run(self, step: StepTensors) -> Tensor:
        return self._model.run(step, self._pages.layers)

    def _fetch(self, logits: Tensor) -> Logits:
        """To the host, in memory that the next step writes over. Waits for the step."""
        if len(self._host) < len(logits):
            self._host = torch.empty(logits.shape, pin_memory=self._streams.cuda)
        rows = self._host[: len(logits)]
        rows.copy_(logits, non_blocking=True)
        self._streams.finish(self._streams.compute)
        fetched: Logits = rows.numpy()
        return fetched


def identity(precision: Precision, facts: ModelFacts) -> BackendIdentity:
    """What this backend would be called here."""
    return BackendIdentity(
        backend="triton",
        mode="exact",
        dtype=str(precision),
        page_layout="layer.16.latent" if facts.mla else "layer.kv.head.16.d",
        instruction_set=arch(),
        threads=0,
        version=f"{triton.__version__}/{sources()}",
    )


@functools.cache
def sources() -> str:
    """A digest of what computes: tiles and the order of sums are part of the bits."""
    digest = hashlib.sha256()
    own = [Path(gpu_model.__file__), Path(gpu_weights.__file__)]
    for path in [*sorted(Path(kernels.__file__).parent.glob("*.py")), *own]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
