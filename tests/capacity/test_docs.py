"""docs/plan.md names every key of a plan, and none that there is not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from engine.capacity import results
from engine.capacity.explain import Line
from engine.capacity.trace import TraceReport
from engine.capacity.wish import Wish

PAGE = (Path(__file__).parents[2] / "docs/plan.md").read_text()
ROWS = PAGE.partition("## Keys of `--json`")[2]


def fields(shape: Any) -> set[str]:
    return {one.name for one in dataclasses.fields(shape)}


def test_every_key_is_documented_and_every_documented_key_is_there() -> None:
    shapes = [one for one in vars(results).values() if isinstance(one, type) and dataclasses.is_dataclass(one)]
    there = set.union(*map(fields, shapes), fields(Line), fields(TraceReport))
    named = set(re.findall(r"`([a-z][a-z0-9_]*)`", ROWS))
    assert there - named == set()
    assert named - there - fields(Wish) - {"memory", "compute", "throughput", "explain", "trace", "text"} == set()
