"""A log of the engine, simulated; the log is small enough to reckon by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bench.policy_replay import compared, hardware, is_close, overhead_s, replayed, source

MACHINE: dict[str, Any] = {
    "kind": "machine",
    "out_tokens": 10,
    "prefill": [[250, 0.25], [1000, 1.0]],
    "again": [200, 50, 0.06],
    "decode_tps": 100.0,
    "host_tps": 10_000.0,
    "nvme_tps": 5_000.0,
    "host_latency_s": 0.01,
    "nvme_latency_s": 0.02,
    "bytes_per_token": 1000,
}
NOTHING = {"device": 0, "host": 0, "nvme": 0, "recomputed": 0, "computed": 0}


def turn(session: str, at_s: float, seconds: float, **held: int) -> list[dict[str, Any]]:
    """One that comes at `at_s` and gets its first token `seconds` later."""
    return [
        {"at_s": at_s, "session": session, "kind": "tool_ended", "tokens": 0, "new_tokens": 0},
        {
            "at_s": at_s + seconds,
            "session": session,
            "kind": "first_token",
            "tokens": 0,
            "held": {**NOTHING, **held},
            "seconds": seconds,
        },
    ]


def log(*turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [MACHINE, *sorted((line for lines in turns for line in lines), key=lambda line: float(line["at_s"]))]


def test_the_machine_is_the_one_that_was_measured():
    machine = hardware(MACHINE)
    assert machine.prefill.seconds(1000) == pytest.approx(1.0)
    assert (machine.host_bps, machine.nvme_read_bps) == (10_000_000, 5_000_000)
    assert overhead_s(MACHINE) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("held", "named", "seconds"),
    [
        ({"computed": 500}, "new", 0.51),
        ({"device": 500, "computed": 50}, "device", 0.06),
        ({"host": 500, "computed": 50}, "host", 0.01 + 0.05 + 0.06),
        ({"nvme": 500, "computed": 50}, "nvme", 0.02 + 0.10 + 0.06),
        ({"recomputed": 500, "computed": 50}, "recompute", 0.56),
        ({"host": 400, "recomputed": 100, "computed": 50}, "host", 0.01 + 0.04 + 0.16),
    ],
)
def test_a_turn_alone_takes_what_its_source_and_its_tokens_take(held, named, seconds):
    [told] = replayed(log(turn("a", 1.0, 0.5, **held)))
    assert (told["source"], told["simulated_s"]) == (named, pytest.approx(seconds))


def test_one_that_comes_while_another_is_served_waits_for_it():
    first, second = replayed(log(turn("a", 0.0, 1.0, computed=200), turn("b", 0.1, 1.0, computed=200)))
    assert first["simulated_s"] == pytest.approx(0.21)
    assert second["simulated_s"] == pytest.approx(0.21 + 0.1 + 0.21 - 0.1)


def test_of_those_that_wait_one_that_returns_from_a_tool_goes_first():
    _, returning, new = sorted(
        replayed(
            log(
                turn("a", 0.0, 1.0, computed=200),
                turn("new", 0.1, 2.0, computed=200),
                turn("back", 0.2, 1.0, device=500, computed=50),
            )
        ),
        key=lambda told: told["came_s"] + told["simulated_s"],
    )
    assert (returning["source"], new["source"]) == ("device", "new")


def test_the_deviation_is_that_of_the_means_and_says_whether_the_simulation_is_close():
    figure = compared(log(turn("a", 0.0, 0.5, computed=500), turn("b", 9.0, 0.12, host=500, computed=50)))
    assert figure["deviation"] == pytest.approx(0.63 / 0.62 - 1, abs=1e-3)
    assert figure["sources"]["new"]["deviation"] == pytest.approx(0.02, abs=1e-3)
    assert is_close(figure)
    assert not is_close({**figure, "fair_deviation": 0.6})


def test_turns_that_met_nobody_say_how_slow_the_machine_was_for_the_others():
    alone = [turn("a", 10.0 * k, 2 * 0.51, computed=500) for k in range(3)]
    queued = [turn("b", 50.0, 0.42, computed=200), turn("c", 50.0, 1.04, computed=200)]
    figure = compared(log(*alone, *queued))
    assert figure["slower"] == pytest.approx(2.0)
    assert figure["deviation"] == pytest.approx(-0.5, abs=1e-3)
    assert figure["met"]["turns"] == 2
    assert figure["met"]["fair_deviation"] == pytest.approx(0.0, abs=1e-3)


def test_a_first_token_without_an_arrival_is_refused():
    with pytest.raises(ValueError, match="a has a first token"):
        replayed(log(turn("a", 1.0, 0.5, computed=10)[1:]))


def test_nothing_known_before_is_new():
    assert source({**NOTHING, "computed": 5}) == "new"


def test_each_trace_is_simulated_on_the_machine_as_it_was_then():
    slower = {**MACHINE, "prefill": [[250, 0.5], [1000, 2.0]]}
    fast, slow = replayed([*log(turn("a", 0.0, 1.0, computed=500)), slower, *turn("a", 0.0, 1.0, computed=500)])
    assert (fast["simulated_s"], slow["simulated_s"]) == (pytest.approx(0.51), pytest.approx(1.0))
