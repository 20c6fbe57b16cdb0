"""Measured speeds: what a backend takes, what transfers take, and when a tier does not pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.backends.face import Logits, Tile
from engine.facts import PAGE_SIZE
from engine.speeds import Link, Room, Speeds, measure
from kvtier import Tier
from kvtier.policy import Prefill
from tests.engine.fakes import PAGE_BYTES, FakeBackend, Harness

LINEAR_S, SQUARE_S = 1e-3, 1e-6


class Clocked(FakeBackend):
    """A backend whose steps take what a prefill of known cost would, by a clock of its own."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def forward(self, tiles: Sequence[Tile]) -> list[Logits | None]:
        start = (len(tiles[0].blocks) - 1) * PAGE_SIZE
        stop = start + sum(len(tile.tokens) for tile in tiles)
        self.now += Prefill(LINEAR_S, SQUARE_S).seconds(stop, start)
        return super().forward(tiles)


def test_prefill_is_measured_near_and_far() -> None:
    backend = Clocked(8)
    speeds = measure(backend, None, PAGE_BYTES, Room(8, 4096), backend.clock)
    assert speeds.prefill is not None
    assert speeds.prefill.linear_s == pytest.approx(LINEAR_S)
    assert speeds.prefill.square_s == pytest.approx(SQUARE_S)


def test_measuring_leaves_the_pool_as_it_was() -> None:
    backend = Clocked(8)
    measure(backend, None, PAGE_BYTES, Room(8, 4096), backend.clock)
    assert all(bytes(backend.page(block)) == bytes(PAGE_BYTES) for block in range(8))


@pytest.mark.parametrize("room", [Room(1, 4096), Room(8, 32)])
def test_where_there_is_no_room_to_measure_nothing_is_said(room: Room) -> None:
    backend = Clocked(8)
    speeds = measure(backend, None, PAGE_BYTES, room, backend.clock)
    assert speeds.prefill is None
    assert speeds.pays({Tier.NVME: 1}, 0, 1)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path) as engine:
        yield engine


def test_tiers_are_measured_where_there_are_any(harness: Harness) -> None:
    speeds = measure(FakeBackend(8), harness.stack, PAGE_BYTES, Room(8, 4096))
    assert speeds.links[Tier.HOST].read_bps > 0
    assert speeds.links[Tier.SHARED].read_bps == 0  # nobody asked the network


def test_a_tier_pays_from_a_length_on() -> None:
    speeds = Speeds(Prefill(1e-3), {tier: Link(1e6, 1e6, 0.05) for tier in Tier})
    assert not speeds.pays({Tier.NVME: 10}, 0, 100)
    assert speeds.pays({Tier.NVME: 100}, 0, 100)
    slow = Speeds(Prefill(1e-3), {tier: Link(1e4, 1e4, 0.05) for tier in Tier})
    assert not slow.pays({Tier.NVME: 10_000}, 0, 100)


def test_who_was_never_tried_is_tried() -> None:
    assert Speeds(Prefill(1e-9)).pays({Tier.SHARED: 16}, 0, 100)


def test_transfers_are_followed() -> None:
    speeds = Speeds(Prefill(1e-3), {tier: Link(1e9, 1e9, 0.0, 0.0) for tier in Tier})
    for _ in range(60):
        speeds.read_took(Tier.NVME, 8 << 20, (8 << 20) / 5e8)
        speeds.write_took(Tier.NVME, 8 << 20, (8 << 20) / 2e8)
    assert speeds.links[Tier.NVME].read_bps == pytest.approx(5e8, rel=0.01)
    assert speeds.links[Tier.NVME].write_bps == pytest.approx(2e8, rel=0.01)
    speeds.read_took(Tier.NVME, 1, 1.0)
    assert speeds.links[Tier.NVME].read_bps == pytest.approx(5e8, rel=0.01)


def test_prefills_are_followed() -> None:
    speeds = Speeds(Prefill(1e-3, 1e-6))
    for _ in range(60):
        speeds.prefill_took(0, 1024, 2 * Prefill(1e-3, 1e-6).seconds(1024))
    assert speeds.compute_s(0, 512) == pytest.approx(2 * Prefill(1e-3, 1e-6).seconds(512), rel=0.01)
    assert speeds.scaled_prefill.linear_s == pytest.approx(2e-3, rel=0.01)
