"""The session's tools as the model is told of them, as far as its configuration alone says what they are."""

from __future__ import annotations

from engine.tokens import ToolSpec
from runtime.config import SessionConfig
from runtime.tools.catalog import Catalog


def tool_specs(config: SessionConfig) -> list[ToolSpec]:
    """Without what MCP servers offer: they are asked when the session first thinks."""
    return Catalog(config).specs
