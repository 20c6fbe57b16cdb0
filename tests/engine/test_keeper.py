"""The tier policy at work in an engine: what it moves, what it leaves, and what the log says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.decisions import DecisionLog
from engine.intents import Intents
from engine.keeper import Keeper
from engine.kvcall import KvCall
from engine.moves import Moves
from engine.speeds import Link, Speeds
from kvtier import Tier
from kvtier.policy import Expected, Policy, Prefill, Reason, TierKeep, record, replay
from tests.engine.fakes import PAGE_BYTES, Harness, oracle
from tests.engine.test_core import PROMPT, turn

SLOW_COMPUTE = Prefill(1.0)  # a second per token: any tier is quicker
BASH = {"state": "tool", "tool": "bash", "timeout_s": 60.0}


def known(prefill: Prefill, bps: float = 1e9) -> Speeds:
    return Speeds(prefill, {tier: Link(bps, bps, 1e-6, 1e-6) for tier in Tier})


def with_policy(harness: Harness, speeds: Speeds, file: Path | None = None) -> Keeper:
    """The harness's intents with measured speeds instead of unknown ones."""
    keeper = Keeper(harness.core, Moves(harness.core), DecisionLog(file), speeds)
    harness.core.timers.clear()
    harness.intents = Intents(harness.core, keeper)
    return keeper


def entries(keeper: Keeper) -> list[dict[str, Any]]:
    return sorted(keeper.decisions.since(0)[1], key=lambda entry: entry["seq"])


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with Harness(tmp_path) as engine:
        yield engine


def test_a_tool_that_starts_has_its_pages_copied_and_none_freed(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    turn(harness, "s", PROMPT, 20)
    receipt = harness.kv("offload", "s", tier="auto", pause=BASH, step=3)
    state = harness.state("s")
    assert (receipt["status"], receipt["tier"]) == ("accepted", "host")
    assert state["host_pages"] == state["device_pages"] == len(state["keys"])
    (entry,) = entries(keeper)
    assert (entry["action"], entry["place"], entry["reason"], entry["step"]) == ("store", "host", "tool_started", 3)
    assert entry["status"] == "done"
    assert entry["predicted_s"] > 0
    assert entry["realised_s"] > 0
    assert entry["instead_s"] == pytest.approx(entry["tokens"])


def test_a_context_that_is_computed_sooner_than_read_is_left_where_it_is(harness: Harness) -> None:
    keeper = with_policy(harness, known(Prefill(1e-12)))
    turn(harness, "s", PROMPT, 20)
    receipt = harness.kv("offload", "s", tier="auto", pause=BASH)
    assert (receipt["status"], receipt["tier"]) == ("rejected", None)
    assert "sooner" in receipt["detail"]
    assert harness.state("s")["host_pages"] == 0
    assert [entry["action"] for entry in entries(keeper)] == ["keep"]


def test_what_was_not_worth_a_copy_is_not_written_when_the_device_gives_it_up(harness: Harness) -> None:
    with_policy(harness, known(Prefill(1e-12)))
    turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause=BASH)
    for other in range(8):
        turn(harness, f"o{other}", [other + 1] * 120, 8)
    counters = harness.stats()["counters"]
    assert counters["unwanted"] > 0
    assert harness.state("s")["host_pages"] == 0


def test_an_approval_leaves_the_device_as_soon_as_its_pages_are_below(harness: Harness) -> None:
    with_policy(harness, known(SLOW_COMPUTE))
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause={"state": "approval"})
    state = harness.state("s")
    assert (state["device_pages"], state["host_pages"]) == (0, len(state["keys"]))
    harness.kv("prefetch", "s")
    done = harness.generate("s", [*transcript, 5], 5)
    assert done.tokens == oracle([*transcript, 5], 5)


def test_pressure_takes_the_pages_of_whoever_is_expected_last(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    for name, timeout_s in (("soon", 2.0), ("late", 3000.0)):
        turn(harness, name, [len(name) + int(timeout_s) % 50] * 124, 8)
        harness.kv("offload", name, tier="auto", pause={**BASH, "tool": name, "timeout_s": timeout_s})
    turn(harness, "other", [9] * 250, 8)
    assert harness.state("soon")["device_pages"] == len(harness.state("soon")["keys"])
    assert harness.state("late")["device_pages"] < len(harness.state("late")["keys"])
    evicted = [entry["session"] for entry in entries(keeper) if entry["reason"] == "pressure"]
    assert evicted == ["late"]


def test_an_eviction_is_settled_with_what_its_absence_cost(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause=BASH)
    turn(harness, "other", [9] * 480, 8)
    evicted = next(entry for entry in entries(keeper) if entry["action"] == "evict")
    assert (evicted["session"], evicted["status"], evicted["realised_s"]) == ("s", "open", None)
    harness.generate("s", [*transcript, 5], 5, known_tokens=len(transcript) - 1)
    told = entries(keeper)
    evicted = next(entry for entry in told if entry["action"] == "evict" and entry["session"] == "s")
    restore = next(entry for entry in told if entry["action"] == "restore")
    assert restore["place"] == "host"
    assert (evicted["status"], evicted["realised_s"]) == ("done", restore["realised_s"])


def test_a_recompute_is_in_the_log_with_what_was_expected_of_it(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause=BASH)
    turn(harness, "other", [9] * 480, 8)
    assert harness.stack is not None
    harness.stack.delete([bytes.fromhex(key) for key in harness.state("s")["keys"]])
    done = harness.generate("s", [*transcript, 5], 5, known_tokens=len(transcript) - 1)
    again = next(entry for entry in entries(keeper) if entry["action"] == "recompute")
    assert again["tokens"] == done.prefill["recomputed"] > 0
    assert again["predicted_s"] > 0
    assert again["realised_s"] > 0


def test_what_a_session_that_ended_lost_was_not_missed(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause=BASH)
    turn(harness, "other", [9] * 480, 8)
    harness.kv("drop", "s")
    evicted = next(entry for entry in entries(keeper) if entry["action"] == "evict")
    assert (evicted["status"], evicted["realised_s"]) == ("moot", 0.0)


def test_a_full_host_tier_hands_the_least_worth_on_to_nvme(tmp_path: Path) -> None:
    with Harness(tmp_path, blocks=64, host_pages=2) as harness:
        with_policy(harness, known(SLOW_COMPUTE))
        for name, timeout_s in (("late", 3000.0), ("soon", 2.0)):
            turn(harness, name, [len(name) + int(timeout_s) % 50] * 160, 8)
            harness.kv("offload", name, tier="auto", pause={**BASH, "tool": name, "timeout_s": timeout_s})
        soon, late = harness.state("soon"), harness.state("late")
        assert soon["host_pages"] == len(soon["keys"])
        assert (late["host_pages"], late["nvme_pages"]) == (0, len(late["keys"]))
        assert harness.stats()["integrity"] == "ok"


def test_the_end_of_a_pause_is_learned(harness: Harness) -> None:
    expected = Expected()
    keeper = Keeper(
        harness.core,
        Moves(harness.core),
        DecisionLog(),
        known(SLOW_COMPUTE),
        Policy(TierKeep(expected), pieces=1, reserves=False),
    )
    harness.intents = Intents(harness.core, keeper)
    turn(harness, "s", PROMPT, 20)
    for _ in range(3):
        harness.kv("offload", "s", tier="auto", pause=BASH)
        harness.kv("prefetch", "s")
    harness.kv("pin", "s", pause=BASH)
    harness.kv("release", "s")
    assert expected.ended("bash") == 4


def test_whole_decisions_in_the_file_play_again_to_the_same_moves(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    with Harness(tmp_path / "tiers") as harness:
        with_policy(harness, known(SLOW_COMPUTE), file)
        for name in ("a", "b"):
            turn(harness, name, [1, ord(name) % 60] * 60, 8)
            harness.kv("offload", name, tier="auto", pause=BASH)
            harness.kv("prefetch", name)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["tool_started", "scheduled"] * 2
    changes = list(replay(lines, Policy(TierKeep(Expected()), pieces=1, reserves=False)))
    assert [change.other for change in changes] == [change.done for change in changes]


def test_a_pin_ends_with_its_epoch_and_a_second_release_is_nothing(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    assert harness.kv("pin", "s", epoch=1)["status"] == "accepted"
    assert harness.stats()["pinned_pages"] > 0
    harness.kv("offload", "s", epoch=2)  # a new owner has taken the session over
    assert harness.stats()["pinned_pages"] == 0
    first, second = (harness.kv("release", "s", epoch=2) for _ in range(2))
    assert (
        (first["status"], first["detail"]) == (second["status"], second["detail"]) == ("accepted", "nothing was pinned")
    )


def test_a_pin_of_a_dead_owner_ends_when_its_session_runs_elsewhere(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    harness.kv("pin", "s", epoch=1)
    harness.generate("s", [*transcript, 5], 2, epoch=2)
    assert harness.stats()["pinned_pages"] == 0


def test_a_pin_ends_by_itself(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    harness.kv("pin", "s", ttl_s=1e-3)
    while harness.stats()["pinned_pages"]:
        pass
    assert harness.kv("release", "s")["detail"] == "nothing was pinned"


def test_a_range_of_tokens_can_be_pinned(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    call = KvCall("pin", "s", 0, b"", (), Tier.HOST, True, False, tokens=(0, 33))
    receipt = harness._ask(lambda reply: harness.intents.handle(call, reply))
    assert (receipt["status"], receipt["pages"], receipt["bytes"]) == ("accepted", 3, 3 * PAGE_BYTES)
    assert harness.stats()["pinned_pages"] == 3


def test_a_line_of_the_log_says_all_that_the_decision_depended_on(harness: Harness) -> None:
    keeper = with_policy(harness, known(SLOW_COMPUTE))
    turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="auto", pause=BASH)
    seen = harness.store.sessions.get("s")
    assert seen is not None
    view = keeper._sight.view(Reason.SCHEDULED, seen)
    (change,) = replay([record(view, [])], Policy(TierKeep(Expected()), pieces=1, reserves=False))
    assert change.other == Policy(TierKeep(Expected()), pieces=1, reserves=False).decide(view)


def test_pages_that_were_brought_and_taken_away_unused_are_counted(harness: Harness) -> None:
    transcript = turn(harness, "s", PROMPT, 20)
    brought = []
    for used in (True, False):
        harness.kv("offload", "s", tier="nvme")
        brought.append(harness.kv("prefetch", "s")["pages"])
        if used:
            harness.generate("s", transcript, 1)
        turn(harness, "other", [9] * 480, 8)
    counters = harness.stats()["counters"]
    assert counters["prefetched"] == sum(brought)
    assert counters["prefetched_unused"] == brought[1]


def test_what_a_session_that_ended_did_not_use_was_no_waste_of_room(harness: Harness) -> None:
    turn(harness, "s", PROMPT, 20)
    harness.kv("offload", "s", tier="nvme")
    harness.kv("prefetch", "s")
    harness.kv("drop", "s")
    turn(harness, "other", [9] * 480, 8)
    assert harness.stats()["counters"]["prefetched_unused"] == 0
