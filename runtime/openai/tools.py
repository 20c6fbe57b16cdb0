"""Tools of a request: functions run at the caller, the sandbox's own run inside, servers are spoken to by the node."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidRequest
from sandbox import TOOLS

OURS = "tenuto"  # the server_label of the sandbox's own tools


def called_name(server_label: str, name: str) -> str:
    """What the model calls a tool of a server."""
    return name if server_label == OURS else f"{server_label}__{name}"


def server_of(called: str) -> tuple[str, str]:
    """The inverse: the server's label, and the tool's name there."""
    label, found, name = called.partition("__")
    return (label, name) if found else (OURS, called)


@dataclass(frozen=True)
class Tools:
    """`session`: as a session declares them; `approvals`: calls that wait for a person; `functions`: names of those
    that run at the caller; `shown`: the request's own, as answers repeat them."""

    session: tuple[Any, ...]
    approvals: Mapping[str, Any]
    functions: frozenset[str]
    shown: tuple[dict[str, Any], ...]

    @property
    def told(self) -> list[Any]:
        """As `session`, with digests in place of what may be secret."""
        return [tool if isinstance(tool, str) else {**tool, **_digested(tool)} for tool in self.session]

    @classmethod
    def of(cls, given: Sequence[Mapping[str, Any]] | None) -> Tools:
        """Raises InvalidRequest, which names the tool that cannot be used."""
        session: list[Any] = []
        approvals: dict[str, Any] = {}
        functions, shown = set(), []
        for index, tool in enumerate(given or ()):
            at = f"tools[{index}]"
            kind = tool.get("type")
            if kind == "function":
                function = _function(tool, at)
                session.append(function)
                functions.add(function["name"])
                shown.append(_shown(tool, function))
            elif kind == "mcp":
                made, names = _mcp(tool, at)
                session += made
                asks = tool.get("require_approval", "always" if tool.get("server_url") else "never")
                if asks == "always":
                    approvals |= {name: {} for name in names}
                elif asks != "never":
                    raise _bad(f"{at}.require_approval", "use always or never")
                shown.append({name: value for name, value in tool.items() if name not in ("headers", "authorization")})
            else:
                raise _bad(
                    f"{at}.type",
                    f"tools of type {kind!r} are not served here; use function, or mcp with the server_label {OURS!r}"
                    f" for the sandbox's own ({', '.join(TOOLS)})",
                )
        return cls(tuple(session), approvals, frozenset(functions), tuple(shown))


def _digested(tool: Mapping[str, Any]) -> dict[str, str]:
    written = {name: json.dumps(tool[name], sort_keys=True) for name in ("headers",) if tool.get(name)}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in written.items()}


def _function(tool: Mapping[str, Any], at: str) -> dict[str, Any]:
    about = tool.get("function") if isinstance(tool.get("function"), Mapping) else tool
    assert isinstance(about, Mapping)
    name = about.get("name")
    if not isinstance(name, str) or not name:
        raise _bad(f"{at}.name", "give a function's name")
    parameters = about.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise _bad(f"{at}.parameters", "give a JSON schema")
    description = str(about.get("description") or name)[:2000]
    schema = {"type": "object", **parameters}
    return {"type": "client", "name": name, "description": description, "parameters": schema}


def _shown(tool: Mapping[str, Any], function: Mapping[str, Any]) -> dict[str, Any]:
    about = tool.get("function") if isinstance(tool.get("function"), Mapping) else tool
    assert isinstance(about, Mapping)
    return {
        "type": "function",
        "name": function["name"],
        "description": about.get("description"),
        "parameters": about.get("parameters"),
        "strict": about.get("strict", True),
    }


def _mcp(tool: Mapping[str, Any], at: str) -> tuple[list[Any], list[str]]:
    label, allowed = tool.get("server_label"), tool.get("allowed_tools")
    names = allowed.get("tool_names") if isinstance(allowed, Mapping) else allowed
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise _bad(f"{at}.allowed_tools", "give a list of names")
    if not isinstance(label, str) or not label:
        raise _bad(f"{at}.server_label", "name the server")
    if tool.get("server_url"):
        headers = tool.get("headers") or {}
        if not isinstance(headers, Mapping):
            raise _bad(f"{at}.headers", "give an object")
        headers = dict(headers)
        if tool.get("authorization"):
            headers["Authorization"] = f"Bearer {tool['authorization']}"
        made = {"type": "mcp", "name": label, "url": tool["server_url"], "headers": headers, "tools": names}
        return [made], [f"{label}__*"]
    if label != OURS:
        raise _bad(f"{at}.server_url", f"give the address of the server {label!r}, or use the server_label {OURS!r}")
    chosen = list(TOOLS) if names is None else list(names)
    if unknown := [name for name in chosen if name not in TOOLS]:
        raise _bad(f"{at}.allowed_tools", f"{unknown[0]!r} is none of {', '.join(TOOLS)}")
    return chosen, chosen


def _bad(at: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{at}: {message}", param=at, code="invalid_value")
