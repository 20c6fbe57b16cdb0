"""Tools as a session's configuration declares them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

Effect = Literal["pure", "sandboxed", "idempotent", "unsafe"]
Method = Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
PLACEHOLDER = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_-]*)\}")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}\Z")
OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "idempotency-key"})
SECRET_LEAST = 6  # characters; shorter values would blot out ordinary text

SECRET_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,62}$"

Name = Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_-]{0,63}$")


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SecretRef(Frozen):
    """A secret of the tenant by its name, with what stands before it (`"prefix": "Bearer "`)."""

    secret: str = Field(pattern=SECRET_NAME)
    prefix: str = Field(default="", max_length=200)


class Sealed(Frozen):
    """A value that was given as it is, as the record keeps it."""

    sealed: str = Field(max_length=2_000_000)


def _value_kind(value: Any) -> str:
    if isinstance(value, Sealed) or (isinstance(value, Mapping) and "sealed" in value):
        return "sealed"
    return "secret" if isinstance(value, SecretRef | Mapping) else "literal"


Value = Annotated[
    Annotated[str, Tag("literal")] | Annotated[SecretRef, Tag("secret")] | Annotated[Sealed, Tag("sealed")],
    Discriminator(_value_kind),
]


def texts(values: Mapping[str, str | SecretRef | Sealed]) -> dict[str, str]:
    """Of a tool that was opened for a call, all of whose values are plain text."""
    plain = {name: value for name, value in values.items() if isinstance(value, str)}
    assert len(plain) == len(values), "a tool runs with its values opened"
    return plain


def is_header_text(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _environment(value: dict[str, Value]) -> dict[str, Value]:
    for name in value:
        if not ENV_NAME.match(name) or name.startswith("TENUTO_"):
            raise ValueError(f"{name!r} cannot be set; use letters, digits and '_', and leave TENUTO_* to us")
    return value


def _headers(value: dict[str, Value]) -> dict[str, Value]:
    for name, given in value.items():
        if not HEADER_NAME.match(name) or name.lower() in OWN_HEADERS:
            raise ValueError(f"{name!r} is no header that can be set here")
        text = given.prefix if isinstance(given, SecretRef) else given if isinstance(given, str) else ""
        if not is_header_text(text):
            raise ValueError(f"the value of {name!r} must be printable ASCII")  # the value itself may be a secret
    return value


def http_url(value: str) -> str:
    """Raises ValueError unless it is an address that a client understands."""
    try:
        parts = urlsplit(value)
        port = parts.port
        httpx2.URL(value).raw_host.decode("ascii")  # what will have to understand it
    except (ValueError, httpx2.InvalidURL):
        raise ValueError("must be an http:// or https:// address, without odd characters") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError("must be an http:// or https:// address")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not carry a name or a password; put them into a header")
    if "{" in parts.netloc:
        raise ValueError("the host must be known beforehand; placeholders belong into the path and the query")
    if parts.fragment:
        raise ValueError("must not have a fragment")
    return value


class Tool(Frozen):
    """What kinds have in common. Values in `secrets` are shown to nobody: not in views, events or results."""

    name: str = Name
    timeout_s: float = Field(default=60.0, gt=0, le=3600)

    @property
    def secrets(self) -> Mapping[str, Value]:
        return {}


class Described(Tool):
    description: str = Field(min_length=1, max_length=2000)
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})

    @field_validator("parameters")
    @classmethod
    def _an_object(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("type") != "object":
            raise ValueError('must be a JSON schema with "type": "object"')
        return value


class CommandTool(Described):
    """A tool that its author brings: a command in the sandbox, given the arguments as JSON on standard input.

    `effect` says what a crash in the middle may mean: `pure` and `sandboxed` calls are run again from the snapshot
    before them, `idempotent` ones are run again with the same TENUTO_CALL_KEY, `unsafe` ones never are.
    """

    type: Literal["command"] = "command"
    command: list[str] = Field(min_length=1, max_length=64)
    env: dict[str, Value] = Field(default_factory=dict, max_length=64)
    effect: Effect | None = None  # None: sandboxed, or unsafe where something leads out of the sandbox
    keep_background: bool = False  # whether processes that it leaves behind live on; else they end with the call

    _env = field_validator("env")(_environment)

    @property
    def secrets(self) -> Mapping[str, Value]:
        return self.env


class HttpTool(Described):
    """A request that the node makes. Arguments fill the {placeholders} of the URL; the rest become the query (GET,
    HEAD, DELETE) or the JSON body.

    An `idempotent` tool is asked again after a crash, with the same Idempotency-Key header.
    """

    type: Literal["http"]
    method: Method = "GET"
    url: str = Field(min_length=1, max_length=4000)
    headers: dict[str, Value] = Field(default_factory=dict, max_length=64)
    effect: Literal["pure", "idempotent", "unsafe"] | None = None  # None: idempotent for GET and HEAD, else unsafe

    _headers = field_validator("headers")(_headers)
    _address = field_validator("url")(http_url)

    @model_validator(mode="after")
    def _placeholders_are_arguments(self) -> Self:
        known = self.parameters.get("properties", {})
        required = self.parameters.get("required", [])
        for name in self.placeholders:
            if name not in known or name not in required:
                raise ValueError(f"the URL takes {{{name}}}, so parameters must describe and require {name!r}")
        return self

    @property
    def placeholders(self) -> list[str]:
        return PLACEHOLDER.findall(self.url)

    @property
    def secrets(self) -> Mapping[str, Value]:
        return self.headers


class McpTool(Tool):
    """An MCP server: `command` starts one in the sandbox, `url` names one outside. Its tools are `<name>__<tool>`.

    `tools` picks some of them. `effect` holds for each; None: as a command's for one in the sandbox, else unsafe.
    """

    type: Literal["mcp"]
    name: str = Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_-]{0,31}$")
    command: list[str] | None = Field(default=None, min_length=1, max_length=64)
    env: dict[str, Value] = Field(default_factory=dict, max_length=64)
    url: str | None = Field(default=None, min_length=1, max_length=4000)
    headers: dict[str, Value] = Field(default_factory=dict, max_length=64)
    tools: list[str] | None = Field(default=None, max_length=64)
    effect: Effect | None = None

    _env = field_validator("env")(_environment)
    _headers = field_validator("headers")(_headers)

    @field_validator("name")
    @classmethod
    def _unambiguous(cls, value: str) -> str:
        if "__" in value:
            raise ValueError("must not contain '__', which stands between a server's name and its tools'")
        return value

    @field_validator("url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        return None if value is None else http_url(value)

    @model_validator(mode="after")
    def _one_way_to_reach_it(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command, for a server in the sandbox, or url, for one outside")
        if self.url is None and self.headers:
            raise ValueError("headers are for a server at a url; give env to a command")
        if self.url is not None and (self.env or self.effect == "sandboxed"):
            raise ValueError("a server at a url is not in the sandbox: it has no env, and no snapshot undoes its calls")
        return self

    @property
    def secrets(self) -> Mapping[str, Value]:
        return {**self.env, **self.headers}

    def full_name(self, tool: str) -> str:
        return f"{self.name}__{tool}"


class ClientTool(Described):
    """A tool that runs at the caller: the session waits until its result is given, or until the deadline."""

    type: Literal["client"]
    deadline_s: float | None = Field(default=None, gt=0, le=31_536_000)


class SessionTool(Tool):
    """A session of its own as a tool: each call starts one with a task, and its answer is the result.

    What is not said here it has from its parent: model, limits, sampling, files none. Its tools are its own.
    """

    type: Literal["session"]
    description: str = Field(min_length=1, max_length=2000)
    timeout_s: float = Field(default=3600.0, gt=0, le=86_400)
    system: str | None = Field(default=None, max_length=200_000)
    tools: list[Any] = Field(default_factory=list, max_length=64)
    max_tool_rounds: int = Field(default=8, ge=0, le=1000)
    tool_choice: str = "auto"

    @property
    def parameters(self) -> dict[str, Any]:
        task = {"type": "string", "description": "What to do, with all that must be known for it."}
        return {"type": "object", "properties": {"task": task}, "required": ["task"], "additionalProperties": False}


AnyTool = CommandTool | HttpTool | McpTool | ClientTool | SessionTool


def kind_of(value: Any) -> str:
    """Told apart before anything else, so that a fault in a tool is reported as that, not as "not a string"."""
    if isinstance(value, str):
        return "builtin"
    kind = value.get("type", "command") if isinstance(value, Mapping) else getattr(value, "type", "command")
    return kind if isinstance(kind, str) else "unknown"


Declared = Annotated[
    Annotated[str, Tag("builtin")]
    | Annotated[CommandTool, Tag("command")]
    | Annotated[HttpTool, Tag("http")]
    | Annotated[McpTool, Tag("mcp")]
    | Annotated[ClientTool, Tag("client")]
    | Annotated[SessionTool, Tag("session")],
    Discriminator(
        kind_of,
        custom_error_type="tool_type",
        custom_error_message=(
            "type must be command, http, mcp, client or session; a built-in tool is given by its name alone"
        ),
    ),
]


def shown(tool: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """A declared tool (as its JSON) without its secrets, as views show it: of those by name, the name."""
    if isinstance(tool, str):
        return tool
    hidden: dict[str, Any] = {
        part: {name: value if names_a_secret(value) else "***" for name, value in tool[part].items()}
        for part in ("env", "headers")
        if tool.get(part)
    }
    if tool.get("type") == "session":
        hidden["tools"] = [shown(one) for one in tool.get("tools", [])]
    return {**tool, **hidden}


def names_a_secret(value: Any) -> bool:
    """Whether a value of `env` or `headers` is the name of a secret, not one itself."""
    return isinstance(value, Mapping) and "secret" in value


def with_values(tool: str | Mapping[str, Any], change: Callable[[Any], Any]) -> str | dict[str, Any]:
    """A declared tool (as its JSON) with every value of its `env` and `headers` changed, and of its own tools."""
    if isinstance(tool, str):
        return tool
    changed: dict[str, Any] = {
        part: {name: change(value) for name, value in tool[part].items()}
        for part in ("env", "headers")
        if isinstance(tool.get(part), Mapping)
    }
    if tool.get("type") == "session":
        changed["tools"] = [with_values(one, change) for one in tool.get("tools", [])]
    return {**tool, **changed}
