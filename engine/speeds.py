"""How fast this machine computes and moves KV: measured when the engine starts, followed while it runs.

From these come the break-even between restoring and recomputing, and every predicted cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.backends.face import Backend, cut
from engine.facts import PAGE_SIZE
from kvtier import Tier, TierStack
from kvtier.policy import Prefill

_WEIGHT = 0.2  # of the newest transfer
_LATENCY_WEIGHT = 0.5  # these tell little of each other, and change with what else the disk does
_LEAST_S = 1e-6
_FSYNC_S = 0.03  # of a write to disk, until one was made
_LARGE_BYTES = 4 * 2**20
_SAMPLE_BYTES = 16 * 2**20
_FAR_PAGE = 32  # where the second measurement of prefill stands
_TILES = 4


@dataclass
class Link:
    """One tier: bytes per second each way, 0 while nothing is known, and the seconds that the smallest transfer takes:
    a write waits for the step that runs and for writes before it."""

    read_bps: float = 0.0
    write_bps: float = 0.0
    latency_s: float = 5e-4
    write_latency_s: float = 5e-3

    def read_s(self, size_bytes: int) -> float:
        """Seconds, or 0 where nothing is known: who never tried must try."""
        return self.latency_s + size_bytes / self.read_bps if self.read_bps else 0.0

    def write_s(self, size_bytes: int) -> float:
        return self.write_latency_s + size_bytes / self.write_bps if self.write_bps else 0.0


@dataclass
class Speeds:
    """`prefill` is None until it was measured: then nothing is said to be slower than anything."""

    prefill: Prefill | None = None
    links: dict[Tier, Link] = field(default_factory=lambda: {tier: Link() for tier in Tier})
    turn_s: float = 0.0  # what a generation takes of the engine, on average
    _scale: float = 1.0  # of the measured prefill, by what real ones took

    def compute_s(self, start: int, stop: int) -> float:
        """Seconds to compute the KV of tokens start..stop."""
        if self.prefill is None or stop <= start:
            return 0.0
        return self._scale * self.prefill.seconds(stop, start)

    @property
    def scaled_prefill(self) -> Prefill:
        """As real ones ran. Where nothing was measured, computing costs so much that it is never preferred."""
        if self.prefill is None:
            return Prefill(1.0)
        return Prefill(self.prefill.linear_s * self._scale, self.prefill.square_s * self._scale)

    def pays(self, tokens: Mapping[Tier, int], start: int, token_bytes: int) -> bool:
        """Whether reading so many tokens from each tier is quicker than computing them, behind `start` others. A tier
        must never make things slower than having none."""
        if self.prefill is None:
            return True
        read_s = sum(self.links[tier].read_s(count * token_bytes) for tier, count in tokens.items())
        return read_s <= self.compute_s(start, start + sum(tokens.values()))

    def read_took(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """Small transfers tell of latency, large ones of bandwidth."""
        link = self.links[tier]
        if size_bytes >= _LARGE_BYTES:
            link.read_bps = _follow(link.read_bps, size_bytes / max(seconds - link.latency_s, _LEAST_S))
        elif link.read_bps:
            link.latency_s = _follow(
                link.latency_s, max(seconds - size_bytes / link.read_bps, _LEAST_S), _LATENCY_WEIGHT
            )

    def write_took(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        link = self.links[tier]
        if size_bytes >= _LARGE_BYTES:
            link.write_bps = _follow(link.write_bps, size_bytes / max(seconds - link.write_latency_s, _LEAST_S))
        elif size_bytes and link.write_bps:
            link.write_latency_s = _follow(
                link.write_latency_s, max(seconds - size_bytes / link.write_bps, _LEAST_S), _LATENCY_WEIGHT
            )

    def prefill_took(self, start: int, stop: int, seconds: float) -> None:
        """Of a prompt that nobody decoded beside."""
        if self.prefill is not None and stop - start >= 4 * PAGE_SIZE:
            self._scale = _follow(self._scale, seconds / max(self.prefill.seconds(stop, start), _LEAST_S))

    def turn_took(self, seconds: float) -> None:
        self.turn_s = _follow(self.turn_s, seconds)

    def as_message(self) -> dict[str, object]:
        prefill = self.scaled_prefill if self.prefill is not None else None
        return {
            "prefill_s_per_token": prefill.linear_s if prefill else None,
            "prefill_s_per_token_squared": prefill.square_s if prefill else None,
            "turn_s": self.turn_s,
            "read_bps": {tier.value: link.read_bps for tier, link in self.links.items()},
            "write_bps": {tier.value: link.write_bps for tier, link in self.links.items()},
        }


@dataclass(frozen=True)
class Room:
    """What a measurement may use: blocks of the pool, positions of the context."""

    blocks: int
    context: int


def measure(
    backend: Backend,
    stack: TierStack | None,
    page_bytes: int,
    room: Room,
    clock: Callable[[], float] = time.perf_counter,
) -> Speeds:
    """Run a few tiles, copy a few pages, read what NVMe has. Takes some tenths of a second, before the first request:
    nothing of it is kept in the pool's pages."""
    speeds = Speeds(_measure_prefill(backend, room, clock))
    if stack is None:
        return speeds
    bps = _copy_bps(page_bytes, clock)
    speeds.links[Tier.HOST] = Link(bps, bps, 5e-4)
    disk = stack.measure(_SAMPLE_BYTES)
    if disk is not None:
        speeds.links[Tier.NVME] = Link(disk.bytes_per_s, disk.bytes_per_s, 1e-3, _FSYNC_S)
    return speeds


def _measure_prefill(backend: Backend, room: Room, clock: Callable[[], float]) -> Prefill | None:
    """From the seconds of a step at the beginning of a context, and of the same step far behind it."""
    tiles = min(_TILES, room.blocks - 1)
    far = min(_FAR_PAGE, room.context // PAGE_SIZE - tiles)
    if tiles < 1 or far < 1:
        return None
    tokens, before = tiles * PAGE_SIZE, far * PAGE_SIZE
    near_s, far_s = (_time_tiles(backend, page, tiles, clock) for page in (0, far))
    # near = linear n + square n^2; far = linear n + square ((n + m)^2 - m^2)
    square_s = max(0.0, (far_s - near_s) / (2 * before * tokens))
    return Prefill(max(near_s / tokens - square_s * tokens, _LEAST_S / tokens), square_s)


def _time_tiles(backend: Backend, page: int, tiles: int, clock: Callable[[], float]) -> float:
    """The quicker of two runs. The pages before are all the same one, whose contents do not matter to the time."""
    blocks = [0] * page + list(range(1, 1 + tiles))
    step = cut(blocks, page * PAGE_SIZE, [1] * tiles * PAGE_SIZE)
    taken = []
    for _ in range(2):
        begun = clock()
        backend.forward(step)
        taken.append(clock() - begun)
    for block in blocks[page:]:
        backend.zero(block)
    return min(taken)


def _copy_bps(page_bytes: int, clock: Callable[[], float]) -> float:
    source = memoryview(bytes(page_bytes))
    target = memoryview(bytearray(page_bytes))
    count = max(1, _SAMPLE_BYTES // page_bytes)
    begun = clock()
    for _ in range(count):
        target[:] = source
    return count * page_bytes / max(clock() - begun, _LEAST_S) / 2  # and as much again to verify it


def _follow(before: float, value: float, weight: float = _WEIGHT) -> float:
    return value if not before else before + weight * (value - before)
