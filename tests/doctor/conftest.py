"""Fixtures of the engine's tests that these use too."""

from __future__ import annotations

from tests.engine.conftest import tiny, tiny_path

__all__ = ["tiny", "tiny_path"]
