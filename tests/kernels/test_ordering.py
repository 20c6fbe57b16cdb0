"""Pages of the GPU between its streams: whatever an engine does with them, what touches a byte is ordered.

The Triton backend runs with its own streams, pages, buffers and steps over the account of `tests.kernels.ordering`; in
place of its kernels there is a model that reads and writes the very rows that they would.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from engine.backends.gpu_streams import Moment, Streams
from tests.engine import test_schedules
from tests.engine.conftest import Loaded, load
from tests.engine.stepped import StreamLanes
from tests.engine.test_schedules import OPS, Rig, Schedule, schedules
from tests.engine.tiny import write_tiny
from tests.kernels.accounted import accounted, watch_tiers
from tests.kernels.ordering import Account, Stream

SEED = 27  # of a schedule that has pages move in every way


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


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
