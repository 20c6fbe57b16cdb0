from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.errors import BackendUnavailable
from engine.kernels import target


@dataclass(frozen=True, kw_only=True)
class Tiled(target.Config):
    block: int


def test_the_interpreter_is_an_arch_of_its_own_and_its_tensors_lie_on_the_cpu():
    assert (target.arch(), target.device()) == ("interpreter", "cpu")


def test_the_nearest_configuration_is_picked():
    table = {
        ("interpreter", 64): Tiled(block=1),
        ("*", 64): Tiled(block=2),
        ("*", 128): Tiled(block=3),
        ("interpreter", "*"): Tiled(block=4),
        ("*", "*"): Tiled(block=5),
        ("sm_90", 96): Tiled(block=6),
    }
    assert [target.pick(table, key).block for key in (64, 128, 96)] == [1, 3, 4]
    assert target.pick({("*", "*"): Tiled(block=5)}, 7).block == 5


def test_a_shape_without_a_configuration_is_refused_in_a_sentence():
    with pytest.raises(BackendUnavailable, match=r"no kernel .* for \(64, 3\) on interpreter.*backend = cpu"):
        target.pick({("sm_90", (64, 3)): Tiled(block=1)}, (64, 3))
