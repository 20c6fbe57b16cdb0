"""A session's tools by the names that the model calls them by, whichever kind they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.tokens import ToolSpec
from runtime.config import SessionConfig
from runtime.errors import InvalidRequest
from runtime.tools import http
from runtime.tools.kinds import AnyTool, ClientTool, CommandTool, HttpTool, McpTool, SessionTool
from sandbox import TOOLS

Listings = Mapping[str, Any]
NO_LISTINGS: Listings = {}


@dataclass(frozen=True)
class Known:
    """One tool. `declared` is its declaration, or the name of a built-in one; `remote` its name at its server.

    `outside`: its calls leave the node and no sandbox is needed. `writes`: they may change the workspace, so they run
    one after another, each followed by a snapshot.
    """

    spec: ToolSpec
    declared: str | AnyTool
    effect: str
    timeout_s: float
    remote: str = ""

    @property
    def outside(self) -> bool:
        return isinstance(self.declared, HttpTool | ClientTool | SessionTool) or (
            isinstance(self.declared, McpTool) and self.declared.url is not None
        )

    @property
    def writes(self) -> bool:
        return not self.outside and self.effect != "pure"


class Catalog:
    """`leads_out`: a writable volume or open egress leads out of the sandbox, where no snapshot undoes anything."""

    def __init__(self, config: SessionConfig, listings: Listings = NO_LISTINGS, *, leads_out: bool = False) -> None:
        default = "unsafe" if leads_out else "sandboxed"
        self._tools = {known.spec.name: known for known in _known(config, listings, default)}

    @property
    def specs(self) -> list[ToolSpec]:
        return [known.spec for known in self._tools.values()]

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    def find(self, name: str) -> Known:
        """Raises InvalidRequest with a sentence that a model can act on."""
        if name not in self._tools:
            raise InvalidRequest(f"there is no tool {name!r}; there are {', '.join(self._tools) or 'none'}")
        return self._tools[name]

    def get(self, name: str) -> Known | None:
        return self._tools.get(name)


def _known(config: SessionConfig, listings: Listings, default: str) -> Iterator[Known]:
    for tool in config.tools:
        if isinstance(tool, str):
            built_in = TOOLS[tool]
            spec = ToolSpec(built_in.name, built_in.description, built_in.parameters)
            effect = default if built_in.effect == "sandboxed" else built_in.effect
            yield Known(spec, tool, effect, config.limits.tool_timeout_s)
        elif isinstance(tool, McpTool):
            yield from _of_server(tool, listings.get(tool.name, {}), default)
        else:
            spec = ToolSpec(tool.name, tool.description, tool.parameters)
            yield Known(spec, tool, _effect(tool, default), tool.timeout_s)


def _effect(tool: CommandTool | HttpTool | ClientTool | SessionTool, default: str) -> str:
    if isinstance(tool, HttpTool):
        return http.effect_of(tool)
    # A call that is a session, or the caller's, is found again by its key: it does not begin twice.
    return tool.effect or default if isinstance(tool, CommandTool) else "idempotent"


def _of_server(tool: McpTool, listing: Mapping[str, Any], default: str) -> Iterator[Known]:
    effect = tool.effect or ("unsafe" if tool.url is not None else default)
    for offered in listing.get("tools", ()):
        spec = ToolSpec(tool.full_name(offered["name"]), offered["description"], offered["parameters"])
        yield Known(spec, tool, effect, tool.timeout_s, offered["name"])
