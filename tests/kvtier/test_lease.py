from __future__ import annotations

import pytest

from kvtier import MemoryObjects
from kvtier.lease import Lease


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


def test_one_holds_it_and_renews_it_and_the_other_waits(objects: MemoryObjects) -> None:
    clock = Clock()
    ours, theirs = Lease(objects, 10, clock), Lease(objects, 10, clock)
    assert ours.hold()
    for _ in range(10):
        assert not theirs.hold()
        clock.now += 8
        assert ours.hold()
    assert len(list(objects.list("lease/"))) == 1


def test_it_passes_on_when_its_holder_is_silent_and_the_old_holder_knows(objects: MemoryObjects) -> None:
    clock = Clock()
    ours, theirs = Lease(objects, 10, clock), Lease(objects, 10, clock)
    assert ours.hold()
    assert not theirs.hold()
    clock.now += 10
    assert not ours.held()
    assert theirs.hold()
    assert not ours.hold()


def test_it_passes_on_at_once_when_it_is_given_back(objects: MemoryObjects) -> None:
    clock = Clock()
    ours, theirs = Lease(objects, 10, clock), Lease(objects, 10, clock)
    assert ours.hold()
    ours.release()
    assert not ours.held()
    assert theirs.hold()


@pytest.mark.parametrize("offset_s", [-1e9, 0.0, 1e9])
def test_no_clock_is_compared_with_another_machines(objects: MemoryObjects, offset_s: float) -> None:
    here, there = Clock(), Clock()
    there.now += offset_s
    ours, theirs = Lease(objects, 10, here), Lease(objects, 10, there)
    assert ours.hold()
    assert not theirs.hold()
    there.now += 9
    assert not theirs.hold()
    there.now += 1
    assert theirs.hold()


def test_a_number_that_others_have_passed_and_tidied_away_does_not_make_a_holder(objects: MemoryObjects) -> None:
    clock = Clock()
    ours, theirs = Lease(objects, 10, clock), Lease(objects, 10, clock)
    create = objects.create

    def slowly(name: str, parts: object) -> bool:
        # While this one is on its way, the other takes numbers 1 and 2 and removes 1.
        objects.create = create  # type: ignore[method-assign]
        assert theirs.hold()
        clock.now += 6
        assert theirs.hold()
        return create(name, parts)  # type: ignore[arg-type]

    objects.create = slowly  # type: ignore[method-assign,assignment]
    assert not ours.hold()
    assert theirs.held()
    clock.now += 6
    assert theirs.hold()
    assert not ours.hold()


def test_strange_names_beside_it_do_no_harm(objects: MemoryObjects) -> None:
    objects.create("lease/README", [b"?"])
    assert Lease(objects, 10, Clock()).hold()
