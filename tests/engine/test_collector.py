"""The shared store is collected by a timer, one round at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.collector import Collector
from kvtier import SharedConfig, Tier, TierConfig, TierStack
from tests.engine.stepped import ManualLanes


class Core:
    def __init__(self, stack: TierStack | None) -> None:
        self.timers: list[object] = []
        self.store = type("Store", (), {"stack": stack, "lanes": ManualLanes()})()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[TierStack]:
    shared = SharedConfig(tmp_path / "shared", 1 << 20, grace_s=0.05)
    with TierStack.open(TierConfig(64, b"f", None, 0, None, 0, shared=shared)) as opened:
        yield opened


def test_marked_pages_go_when_a_round_is_due(stack: TierStack) -> None:
    core = Core(stack)
    collector = Collector(core, every_s=10.0)  # type: ignore[arg-type]
    key = bytes(32)
    stack.put([(key, bytes(64))], epoch=0, salt_id=b"t", tier=Tier.SHARED)
    stack.delete([key])
    assert collector.tick(100.0) == 10.0
    assert collector.tick(104.0) == 6.0
    assert collector.tick(110.0) is None
    assert collector.tick(111.0) is None  # one round at a time
    assert len(core.store.lanes.writes) == 1
    for now in itertools.count(120, 20):
        core.store.lanes.land_write()
        if collector.pages:
            break
        assert collector.tick(now) == 10.0
        assert collector.tick(now + 10) is None
    assert collector.pages == 1


def test_without_a_shared_store_there_is_no_timer() -> None:
    core = Core(None)
    Collector(core)  # type: ignore[arg-type]
    assert core.timers == []
