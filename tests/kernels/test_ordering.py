"""Pages of the GPU between its streams: whatever an engine does with them, what touches a byte is ordered.

The Triton backend runs with its own streams, pages, buffers and steps over the account of `tests.kernels.ordering`; in
place of its kernels there is a model that reads and writes the very rows that they would.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import shutil
import struct
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine import core, transfers
from engine.backends import gpu_pages, gpu_step, triton
from engine.backends.face import Wish
from engine.backends.gpu_pages import LayerArrival
from engine.backends.gpu_step import StepTensors
from engine.backends.gpu_streams import Moment, Streams
from engine.facts import PAGE_SIZE
from engine.sampler import sample
from kvtier import TierStack
from tests.engine import test_schedules
from tests.engine.conftest import Loaded, load
from tests.engine.stepped import StreamLanes
from tests.engine.test_schedules import OPS, Rig, Schedule, schedules
from tests.engine.tiny import write_tiny
from tests.kernels.ordering import Account, Stream, accounted_streams

SEED = 27  # of a schedule that has pages move in every way
ROW_WORDS = 8  # of a tiny model's page


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


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
    patch.setattr(core, "sample", sampling)


def play(tiny: Loaded, schedule: Schedule, hurries: bool, sabotage: Callable[[Any], None] = lambda _: None) -> None:
    """What each request says is compared in other suites."""
    account, root = Account(), Path(tempfile.mkdtemp(prefix="tenuto-order-"))
    try:
        with pytest.MonkeyPatch.context() as patch, account.watching():
            for name in ("LEAST_PAGES", "LEAST_TOKENS"):
                patch.setattr(f"engine.ahead.{name}", 1)
            patch.setattr(test_schedules, "alone", lambda _, told: told.tokens)
            watch_tiers(account, patch)
            backend = accounted(account, patch, tiny, hurries=hurries)
            sabotage(patch)
            rig = Rig("ordered", backend, tiny.facts.page_bytes("bf16"), tiny.facts.vocab, StreamLanes)
            engine = test_schedules.check(rig, schedule, root)
    finally:
        shutil.rmtree(root)
    account.check(engine.store.backend._pages.layers)


def chance(seed: int, length: int) -> Schedule:
    numbers = random.Random(seed)
    return [(numbers.choice(OPS), numbers.randrange(2**16), numbers.randrange(2**16)) for _ in range(length)]


@pytest.mark.parametrize("hurries", [True, False], ids=["events-early", "events-late"])
def test_whatever_an_engine_does_with_pages_is_ordered(tiny: Loaded, hurries: bool) -> None:
    play(tiny, chance(SEED, 25), hurries)


@pytest.mark.soak
@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@pytest.mark.parametrize("hurries", [True, False], ids=["events-early", "events-late"])
@given(schedule=schedules)
def test_any_schedule_of_an_engine_is_ordered(tiny: Loaded, hurries: bool, schedule: Schedule) -> None:
    play(tiny, schedule, hurries)


def deaf(line: str) -> Callable[[Any], None]:
    """A stream that waits for no other."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        wait = Stream.wait_event
        patch.setattr(Stream, "wait_event", lambda me, event: None if me.name == line else wait(me, event))

    return sabotage


SABOTAGES: dict[str, Callable[[Any], None]] = {
    "on compute after .* on inward": deaf("compute"),
    "on inward after .* on compute": deaf("inward"),
    "on outward after .* on compute": deaf("outward"),
    "a read on host after a write on compute": lambda patch: patch.setattr(Streams, "finish", lambda *_: None),
    "a read on host after a write on outward": lambda patch: patch.setattr(Moment, "wait", lambda _: None),
    "not recorded as used on outward": lambda patch: patch.setattr(Account, "record", lambda *_: None),
}


@pytest.mark.parametrize("said", SABOTAGES)
def test_what_is_not_ordered_is_noticed(tiny: Loaded, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        play(tiny, chance(SEED, 25), False, SABOTAGES[said])


@pytest.mark.parametrize("layers", [1, 2], ids=["failed-half-way", "came"])
@pytest.mark.parametrize("sabotaged", [False, True])
def test_a_landing_is_given_out_again_only_after_the_copies_out_of_it(
    tiny: Loaded, layers: int, sabotaged: bool
) -> None:
    account = Account()
    with pytest.MonkeyPatch.context() as patch, account.watching():
        backend = accounted(account, patch, tiny, hurries=False)(4)
        if sabotaged:
            patch.setattr(Moment, "done", lambda _: True)
        backend.landing(0)
        backend.landing(1)
        arrival = backend.expect([0, 1])
        arrival.land(layers)
        arrival.fail()
        if layers < backend.layers:
            backend.zero(0)
            backend.zero(1)
        for block in (2, 3):
            account.host(backend.landing(block), writes=True)
    assert bool(account.races) == sabotaged
