"""What each node of a machine is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import StartupError
from runtime.seats import clear_unseated, seats
from runtime.settings import Settings


def settings(home: Path, **given: str) -> Settings:
    return Settings.load({}, {"TENUTO_HOME": str(home), **given})


def test_one_node_has_the_places_that_it_always_had(tmp_path: Path) -> None:
    one = settings(tmp_path, TENUTO_NODE_ID="harbour")
    (seat,) = seats(one)
    assert (seat.node, seat.engine, seat.settings.node_id) == ("node", "engine", "harbour")
    assert (seat.socket, seat.kv_dir, seat.host_arena) == (one.engine_socket, one.kv_dir, one.host_arena)


def test_several_share_what_the_machine_was_given_and_no_place(tmp_path: Path) -> None:
    two = settings(tmp_path, TENUTO_NODES="2", TENUTO_NVME_KV_BYTES="2G", TENUTO_HOST_KV_BYTES="100M")
    first, second = seats(two)
    assert [seat.settings.node_id for seat in (first, second)] == ["node-1", "node-2"]
    assert [seat.engine for seat in (first, second)] == ["engine-1", "engine-2"]
    assert first.kv_dir == two.kv_dir
    assert {first.socket, first.kv_dir, first.host_arena}.isdisjoint({second.socket, second.kv_dir, second.host_arena})
    assert sum(seat.settings.nvme_kv_bytes for seat in (first, second)) == 2 << 30
    assert sum(seat.settings.host_kv_bytes for seat in (first, second)) == 100 << 20
    assert Settings.load({}, second.settings.environment()) == second.settings


def test_several_nodes_with_one_engine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="each node has an engine of its own"):
        seats(settings(tmp_path, TENUTO_NODES="2", TENUTO_ENGINE_ADDRESS="gpu-1:9000"))


def test_tiers_of_nodes_that_are_no_longer_there_are_removed_and_no_others(tmp_path: Path) -> None:
    for name in ("kv", "kv-2", "kv-3", "kv-notes"):
        (tmp_path / name).mkdir()
    clear_unseated(settings(tmp_path, TENUTO_NODES="2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "kv-2", "kv-notes"]
