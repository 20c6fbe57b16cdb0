"""Each explained line can be followed by hand: its right side, worked out by something else, is its result."""

from __future__ import annotations

import math
import re

import pytest

from engine.capacity import explain
from tests.capacity.arithmetic import worked_out
from tests.capacity.support import NAMES, planned

WISHES = [
    {},
    {"device": "h200", "tp": 8, "context": 2048, "users": 5000, "overhead_gb": 1.5},
    {"device": "mi300x", "kv_dtype": "fp8", "weights_dtype": "int4", "requests_per_second": 400.0, "headroom": 0.35},
]


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_what_its_arithmetic_gives(name: str) -> None:
    for wish in WISHES:
        if wish.get("tp") == 8 and name in ("gemma-3-1b", "qwen2.5-0.5b", "smollm2-135m"):
            continue  # do not divide among so many
        one = planned(name, **wish)
        lines = explain(one)
        assert {"parameters", "weight_bytes", "kv_bytes_per_session", "decode_step_ms"} <= {line.key for line in lines}
        for line in lines:
            assert math.isclose(worked_out(line.arithmetic), line.value, rel_tol=2e-4), (name, wish, str(line))


def test_a_rack_of_devices_is_explained_too() -> None:
    lines = explain(planned("deepseek-v3", device="gb200", tp=72, dp_attention=True, users=100_000))
    assert all(math.isclose(worked_out(line.arithmetic), line.value, rel_tol=2e-4) for line in lines)
    assert "users_by_memory" in {line.key for line in lines}


def test_a_line_says_the_value_of_the_plan() -> None:
    one = planned("llama-3-70b", tp=4, context=8192, users=500)
    for line in explain(one):
        if hasattr(one.plan, line.key):
            assert line.value == getattr(one.plan, line.key), line.key
        written = re.fullmatch(r"(.+) = ([\d,.e+-]+)( .+)?", str(line))
        assert written, str(line)
        assert math.isclose(worked_out(written[2]), line.value, rel_tol=1e-4, abs_tol=1e-4), str(line)


def test_nobody_else_s_numbers_are_in_a_line_of_kv() -> None:
    [line] = [one for one in explain(planned("llama-3-70b")) if one.key == "kv_bytes_per_token"]
    assert str(line) == "80 * 8 * 256 * 2 = 327,680 B"
