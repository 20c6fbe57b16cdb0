"""The built-in tools: what a model may call, and the command that each call becomes in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from .errors import BadArguments

Effect = Literal["pure", "sandboxed", "idempotent", "unsafe"]
Command = tuple[list[str], bytes]
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1" && echo "wrote $(stat -c %s -- "$1") bytes to $1"'


@dataclass(frozen=True)
class BuiltinTool:
    """`effect`: "pure" changes nothing; "sandboxed" changes only the workspace, so a snapshot undoes it.

    `parameters` is a JSON schema: an object of strings, all required, none beyond `maxLength` characters. A `stateful`
    tool's command is for `Shell`, which keeps its state; by itself it runs without any.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    effect: Effect
    build: Callable[[Mapping[str, str]], Command]
    stateful: bool = False

    @property
    def writes(self) -> bool:
        """Whether it may write the workspace: such calls of one step run one after another."""
        return self.effect != "pure"

    def command(self, arguments: Mapping[str, Any]) -> Command:
        """(argv, stdin). Raises BadArguments with a sentence that a model can act on."""
        properties: Mapping[str, Any] = self.parameters["properties"]
        if not isinstance(arguments, Mapping):
            raise BadArguments(f"{self.name}: arguments must be an object, not {type(arguments).__name__}")
        for name in arguments:
            if name not in properties:
                raise BadArguments(f"{self.name}: unknown argument {name!r}; it takes {', '.join(properties)}")
        for name, schema in properties.items():
            _check(self.name, name, arguments.get(name), schema)
        return self.build(arguments)


def _check(tool: str, name: str, value: object, schema: Mapping[str, Any]) -> None:
    if value is None:
        raise BadArguments(f"{tool}: the argument {name!r} is missing")
    if not isinstance(value, str):
        raise BadArguments(f"{tool}: {name!r} must be a string, not {type(value).__name__}")
    if len(value) > schema["maxLength"]:
        raise BadArguments(f"{tool}: {name!r} has {len(value)} characters; at most {schema['maxLength']} are allowed")
    if len(value) < schema.get("minLength", 0):
        raise BadArguments(f"{tool}: {name!r} is empty")
    if name == "path":
        _check_path(tool, value)
    elif name != "content" and "\0" in value:
        raise BadArguments(f"{tool}: {name!r} has a NUL character in it")


def _check_path(tool: str, path: str) -> None:
    if "\0" in path or ".." in path.split("/") or (path.startswith("/") and not path.startswith("/work/")):
        raise BadArguments(f"{tool}: {path!r} is outside the workspace; use a path relative to /work, without '..'")


def _schema(**lengths: tuple[str, int, int]) -> Mapping[str, Any]:
    properties = {
        name: {"type": "string", "description": text, "minLength": least, "maxLength": most}
        for name, (text, least, most) in lengths.items()
    }
    return MappingProxyType(
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    )


def _inside(path: str) -> str:
    """The path as a command takes it: relative to /work, and never an option."""
    return "./" + path.removeprefix("/work/").lstrip("/")


def _bash(arguments: Mapping[str, str]) -> Command:
    return ["bash", "-c", arguments["command"]], b""


COMMAND_LINE = _schema(command=("a bash command line", 1, 2000))
TOOLS: Mapping[str, BuiltinTool] = MappingProxyType({
    tool.name: tool
    for tool in (
        BuiltinTool(
            "python",
            "Run Python code in the workspace and return what it prints.",
            _schema(code=("Python source code", 1, 2000)),
            "sandboxed",
            lambda arguments: (["python3", "-c", arguments["code"]], b""),
        ),
        BuiltinTool(
            "bash",
            "Run a bash command in the workspace and return its output.",
            COMMAND_LINE,
            "sandboxed",
            _bash,
        ),
        BuiltinTool(
            "shell",
            "Run a command in a bash that stays: the folder it is in, variables and jobs are there in the next call.",
            COMMAND_LINE,
            "sandboxed",
            _bash,
            stateful=True,
        ),
        BuiltinTool(
            "read_file",
            "Return the contents of a file in the workspace.",
            _schema(path=("the file, relative to the workspace", 1, 200)),
            "pure",
            lambda arguments: (["cat", _inside(arguments["path"])], b""),
        ),
        BuiltinTool(
            "write_file",
            "Write a file in the workspace; its folders are made, what was there is replaced.",
            _schema(path=("the file, relative to the workspace", 1, 200), content=("the whole file", 0, 4000)),
            "sandboxed",
            lambda arguments: (
                ["bash", "-c", WRITE, "write_file", _inside(arguments["path"])],
                arguments["content"].encode(errors="surrogatepass"),
            ),
        ),
    )
})  # fmt: skip


def tool_argv(name: str, arguments: Mapping[str, Any]) -> Command:
    """(argv, stdin) for a call of a built-in tool. Raises BadArguments."""
    tool = TOOLS.get(name)
    if tool is None:
        raise BadArguments(f"there is no built-in tool {name!r}; there are {', '.join(TOOLS)}")
    return tool.command(arguments)
