"""Whether a tier is worth it: traffic whose answer is known, and odd lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from engine.capacity import PlanError, TierSizes, TraceReport, read_trace
from tests.capacity.support import planned

TIERS = ("host", "nvme")


def traffic(rows: Sequence[dict[str, Any]], sizes: TierSizes | None = None, **wish: Any) -> TraceReport:
    lines = [json.dumps(row) for row in rows]
    return read_trace(planned("llama-3.1-70b", tp=4, **wish), lines, sizes or TierSizes())


def request(ids: list[int], more: int = 10) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 512 * len(ids) + more, "output_length": 10, "hash_ids": ids}


def test_prefixes_that_never_come_back_need_no_tier() -> None:
    found = traffic([request(list(range(n, n + 8))) for n in range(0, 800, 8)])
    assert (found.kind, found.count, found.device_tokens) == ("requests", 100, 0)
    assert found.verdict.startswith("not worth it: nothing comes back")


def test_what_the_device_still_holds_needs_no_tier() -> None:
    found = traffic([request([1, 2, 3])] * 10)
    assert found.device_tokens == 9 * 3 * 512
    assert found.verdict.startswith("not worth it")


def test_a_working_set_beyond_the_device_is_worth_one() -> None:
    """Round and round over more prefixes than the device holds: each comes back just after it has left."""
    rounds = [request(list(range(n * 1000, n * 1000 + 16))) for n in range(80)] * 3
    found = traffic(rounds)
    assert found.device_tokens == 0
    assert [one.worth for one in found.tiers] == [True, False]
    assert found.tiers[0].returned_tokens == 2 * 80 * 16 * 512
    assert found.verdict.startswith("worth it: host would save")
    small = traffic(rounds, TierSizes(host_gb=1.0))
    assert [one.worth for one in small.tiers] == [False, True]


def test_a_tier_that_is_slower_than_computing_is_never_read() -> None:
    rounds = [request(list(range(n * 1000, n * 1000 + 16))) for n in range(80)] * 3
    found = traffic(rounds, host_gb_s=1.0, nvme_gb_s=1.0)
    assert found.tiers[0].restored_tokens == 0
    assert found.verdict.endswith("computed more quickly than it is read")


def session(pause_s: float | None, calls: int = 20) -> dict[str, Any]:
    turn = [{"role": "assistant", "content": "a" * 400}, {"role": "tool", "content": "b" * 4000}]
    return {
        "id": "s",
        "messages": [{"role": "user", "content": "u" * 4000}, *turn * calls],
        "tool_seconds": [pause_s] * calls,
    }


def test_agents_that_all_fit_need_no_tier_and_twice_as_many_do() -> None:
    few = traffic([session(5.0)] * 3, users=10)
    assert (few.kind, few.count) == ("sessions", 3)
    assert few.verdict.startswith("not worth it: nothing comes back")
    many = traffic([session(5.0)] * 3, users=1000)
    assert many.verdict.startswith("worth it")


def test_a_pause_that_is_shorter_than_a_write_sends_nothing_away() -> None:
    assert not any(one.returned_tokens for one in traffic([session(0.0)] * 3, users=1000).tiers)


def test_what_is_not_recorded_is_said() -> None:
    assert any("20 of 40 pauses" in one for one in traffic([session(1.0), session(None)]).assumed)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "it has no lines"),
        (["{"], "line 1 is not JSON"),
        (["[" * 100_000], "line 1 is not JSON"),
        (["{}"], "neither a request"),
        (['{"hash_ids": [1]}'], "input_length"),
        (['{"hash_ids": [1], "input_length": true}'], "input_length"),
        (['{"hash_ids": ["x"], "input_length": 5}'], "hash_ids"),
        (['{"hash_ids": [1], "input_length": 5}', '{"messages": []}'], "line 2"),
        (['{"messages": [1]}'], "messages is no list of objects"),
        (['{"messages": [], "tool_seconds": [-1]}'], "tool_seconds"),
    ],
)
def test_a_line_that_is_none_is_named(lines: list[str], said: str) -> None:
    with pytest.raises(PlanError, match=r"^trace: ") as error:
        read_trace(planned("llama-3-70b", tp=4), lines, TierSizes())
    assert said in str(error.value)


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_a_tier_has_a_size(size: float) -> None:
    with pytest.raises(PlanError, match="host_gb"):
        TierSizes(host_gb=size)
