"""Contracts of every backend, for a suite that has fixtures of its own."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def adopt(suite: dict[str, Any], contract: ModuleType, *names: str) -> None:
    """Add the tests of a contract to a suite's globals: those named, or all."""
    found = {name: test for name, test in vars(contract).items() if name.startswith("test_")}
    suite |= {name: found[name] for name in names or found}
