"""Two tenants with the same prompt: no page is shared in any tier, and the work done tells neither of the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.reports import AuditAsk
from kvtier import SharedConfig, TierConfig
from tests.engine.fakes import FINGERPRINT, PAGE_BYTES, oracle
from tests.engine.test_core import PROMPT, turn
from tests.engine.tiered import Tiered

ALICE, BOB = (b"a" * 32).hex(), (b"b" * 32).hex()
PLACES = ("device", "host", "nvme", "shared")


class Watched(Tiered):
    """A harness with every tier, in which it is noted what is asked of the tiers and what the model computes."""

    def __init__(self, root: Path) -> None:
        shared = SharedConfig(root / "shared", 1 << 22)
        host, nvme = root / "arena", root / "nvme"
        super().__init__(TierConfig(PAGE_BYTES, FINGERPRINT, host, 1 << 20, nvme, 1 << 22, shared=shared))

    def work_of(self, salt: str) -> dict[str, Any]:
        """What a new session with the common prompt costs: tiles of every step, and pages that the tiers found."""
        assert self.stack is not None
        stack, found = self.stack, []
        lookup = stack.lookup

        def noted(keys: Sequence[bytes]) -> list[Any]:
            places = lookup(keys)
            found.append((len(keys), sum(place is not None for place in places)))
            return places

        stack.lookup = noted  # type: ignore[method-assign]
        self.backend.steps.clear()
        done = self.generate("new", PROMPT, 8, salt=salt)
        del stack.lookup  # type: ignore[method-assign]
        assert done.tokens == oracle(PROMPT, 8)
        sources = {name: value for name, value in done.prefill.items() if name not in ("type", "request_id")}
        return {"steps": list(self.backend.steps), "asked": found, "sources": sources}


def occupied(harness: Watched, place: str, salt: str) -> None:
    """A session of this tenant with the common prompt, whose pages lie in one place."""
    turn(harness, "theirs", PROMPT, 20, salt=salt)
    if place != "device":
        assert harness.kv("offload", "theirs", tier=place, evict=True, salt=salt)["status"] == "accepted"


@pytest.mark.parametrize("place", PLACES)
def test_a_tenant_cannot_tell_whether_another_was_there(tmp_path: Path, place: str) -> None:
    with Watched(tmp_path / "alone") as alone, Watched(tmp_path / "after") as after:
        occupied(after, place, ALICE)
        expected, seen = alone.work_of(BOB), after.work_of(BOB)
        assert seen == expected
        assert seen["sources"]["computed"] == len(PROMPT)


@pytest.mark.parametrize("place", PLACES)
def test_the_same_tenant_does_find_its_pages(tmp_path: Path, place: str) -> None:
    with Watched(tmp_path) as harness:
        occupied(harness, place, ALICE)
        seen = harness.work_of(ALICE)
        assert seen["sources"][place] > 0
        assert seen["sources"]["computed"] < len(PROMPT)


def test_no_key_of_one_tenant_is_a_key_of_another(tmp_path: Path) -> None:
    with Watched(tmp_path) as harness:
        keys = []
        for name, salt in (("a", ALICE), ("b", BOB)):
            turn(harness, name, PROMPT, 20, salt=salt)
            for place in ("host", "nvme", "shared"):
                harness.kv("offload", name, tier=place, salt=salt)
            keys.append(set(harness.state(name)["keys"]))
        assert not keys[0] & keys[1]
        report = harness._ask(lambda reply: harness.reports.audit(AuditAsk(verify=False), reply))
        assert set(report["device"]).union(*report["tiers"].values()) == keys[0] | keys[1]
        harness.kv("drop", "a", salt=ALICE)
        report = harness._ask(lambda reply: harness.reports.audit(AuditAsk(verify=False), reply))
        for found in (report["device"], *report["tiers"].values()):
            assert not set(found) & keys[0]
        assert set(report["tiers"]["nvme"]) == keys[1]
