"""The session's tools as the model is told of them."""

from __future__ import annotations

from engine.tokens import ToolSpec
from runtime.config import CommandTool, SessionConfig
from sandbox import TOOLS


def tool_specs(config: SessionConfig) -> list[ToolSpec]:
    def spec(tool: str | CommandTool) -> ToolSpec:
        if isinstance(tool, CommandTool):
            return ToolSpec(tool.name, tool.description, tool.parameters)
        builtin = TOOLS[tool]
        return ToolSpec(builtin.name, builtin.description, builtin.parameters)

    return [spec(tool) for tool in config.tools]
