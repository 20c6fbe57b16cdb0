"""Plans of the configs beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.capacity import ModelFacts, Plan, Planned, Wish, make_plan, read_config

CONFIGS = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def config(name: str) -> dict[str, Any]:
    return dict(json.loads((CONFIGS / f"{name}.json").read_text()))


def facts(name: str, **changes: Any) -> ModelFacts:
    return read_config(config(name) | changes, name)


def planned(name: str, **wish: Any) -> Planned:
    return make_plan(facts(name), Wish(**wish))


def plan(name: str, **wish: Any) -> Plan:
    return planned(name, **wish).plan
