"""`@tenuto.tool`: a function of yours as a tool that the model can call, described by its hints and docstring."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast, get_type_hints, overload

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from tenuto.errors import ToolError

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}\Z")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SECTION = re.compile(r"^(?:Args|Arguments|Parameters):\s*$")
_ENTRY = re.compile(r"^\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s+(.+)$")
_FIELD = re.compile(r"^\s*:param\s+(?:[^:]+\s)?(\w+):\s+(.+)$")
_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)
MAX_DESCRIPTION = 2000  # characters
MAX_OUTPUT = 1_000_000  # characters of a result


class _Schema(GenerateJsonSchema):
    """A default that JSON cannot say is left out of the schema; the function knows it."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012


class Tool(Generic[P, R]):
    """A function that a session can call. It can still be called as the function that it is.

    `name`, `description` and `parameters` (a JSON schema) are what the model is told; `deadline_s`: seconds until the
    session goes on without a result.
    """

    def __init__(
        self, function: Callable[P, R], name: str | None, description: str | None, deadline_s: float | None
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        if not _NAME.match(self.name):
            raise ToolError(f"{self.name!r} is no name of a tool: use letters, digits, _ and -, or give tool(name=...)")
        text = inspect.getdoc(function) or ""
        self.description = (description or _first_paragraph(text) or self.name)[:MAX_DESCRIPTION]
        self.deadline_s = deadline_s
        self._hints = _hints(self.name, function)
        self._adapters = {name: _adapter(self.name, name, hint) for name, hint in self._hints.items()}
        self._required = _required(function)
        self.parameters = self._described(_documented(text))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def declaration(self) -> dict[str, Any]:
        """The tool as a session is made with it."""
        told: dict[str, Any] = {"type": "client", "name": self.name, "description": self.description}
        told["parameters"] = self.parameters
        return told if self.deadline_s is None else {**told, "deadline_s": self.deadline_s}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the model gave, as the function takes it. Raises ToolError with all that is wrong in a sentence."""
        faults = [f"{name}: there is no such argument" for name in given if name not in self._adapters]
        faults += [f"{name}: it is missing" for name in self._required if name not in given]
        found = {}
        for name in self._adapters.keys() & given.keys():
            try:
                found[name] = self._adapters[name].validate_python(given[name])
            except ValidationError as error:
                faults += [_fault(name, one) for one in error.errors(include_url=False, include_context=False)]
        if faults:
            raise ToolError("; ".join(sorted(faults)))
        return found

    def _described(self, documented: Mapping[str, str]) -> dict[str, Any]:
        properties = {}
        for name, adapter in self._adapters.items():
            schema = _schema_of(self.name, name, adapter, self._hints[name])
            if name in documented:
                schema = {"description": documented[name], **schema}
            properties[name] = schema
        for name, default in _defaults(self.function).items():
            try:
                properties[name]["default"] = self._adapters[name].dump_python(default, mode="json", warnings=False)
            except ValueError:  # JSON cannot say it
                continue
        required = {"required": self._required} if self._required else {}
        return {"type": "object", "properties": properties, **required, "additionalProperties": False}


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(
    *, name: str | None = None, description: str | None = None, deadline_s: float | None = None
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    deadline_s: float | None = None,
) -> Tool[P, R] | Callable[[Callable[P, R]], Tool[P, R]]:
    """Make a tool of a function, blocking or async: sessions made with it call it here, while `run` waits.

    The model is told the docstring's first paragraph, the parameters with their hints, and what `Annotated`, an `Args:`
    section or `:param name:` says of them. What the model gives is validated first. The result is its text, anything
    else as JSON; an exception is told with its type and message. `deadline_s`: seconds after which the session goes on
    without a result; a blocking function that is still running then runs to its end, and its result is dropped.

    Raises ToolError where a hint cannot become a JSON schema.

    ```python
    import tenuto

    @tenuto.tool
    def population(city: str, year: int = 2020) -> int:
        \"\"\"How many people live in a city.

        Args:
            city: its usual name, in English
        \"\"\"
        return 2_800_000

    with tenuto.Client() as client:
        session = client.sessions.create(tools=[population], limits={"max_think_tokens": 48})
        turn = session.run("How many people live in Rome?", tool_choice="required", max_tool_rounds=1)
        print(turn.tool_calls)
        session.cancel()
    ```
    """
    if function is None:
        return lambda given: Tool(given, name, description, deadline_s)
    return Tool(function, name, description, deadline_s)


Given = str | Mapping[str, Any] | Callable[..., Any]


def bound(tools: Sequence[Given] | None) -> dict[str, Tool[..., Any]]:
    """The functions among tools, by their names. Raises ToolError where two have one name."""
    found: dict[str, Tool[..., Any]] = {}
    for one in tools or ():
        if isinstance(one, str | Mapping):
            continue
        made = one if isinstance(one, Tool) else tool(one)
        if made.name in found:
            raise ToolError(f"two functions have the name {made.name!r}; give one of them tool(name=...)")
        found[made.name] = made
    return found


def declared(tools: Sequence[Given] | None) -> list[str | dict[str, Any]] | None:
    """Tools as a request says them."""
    if tools is None:
        return None
    if isinstance(tools, str):
        raise ToolError(f"tools is the text {tools!r}; give a list")
    for one in tools:
        if not (isinstance(one, str | Mapping) or callable(one)):
            raise ToolError(f"{one!r} is no tool: give a built-in one's name, a function, or an object that says one")
    return [
        one
        if isinstance(one, str)
        else dict(one)
        if isinstance(one, Mapping)
        else (one if isinstance(one, Tool) else tool(one)).declaration()
        for one in tools
    ]


def as_output(value: Any) -> str:
    """A result as the model reads it: a text as it is, nothing for None, anything else as JSON. Raises ValueError."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else _ANYTHING.dump_json(value, fallback=str).decode()
    return sendable(text)


def as_fault(error: BaseException) -> str:
    """An exception as the model reads it: its type and message."""
    try:
        said = str(error)
    except Exception:  # a message that cannot be made is none
        said = ""
    return sendable(f"{type(error).__name__}: {said}" if said else type(error).__name__)


def sendable(text: str) -> str:
    """The text as the server takes it: no NUL, no half of a surrogate pair, and not too long."""
    return re.sub("[\0\ud800-\udfff]", "\ufffd", text[:MAX_OUTPUT])


def _hints(tool_name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Of each parameter. Raises ToolError where one has none, or cannot be given by name."""
    try:
        hints = get_type_hints(_plain(function), include_extras=True)
    except Exception as error:
        raise ToolError(f"tool {tool_name!r}: its type hints cannot be read: {error}") from error
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        where = f"tool {tool_name!r}, parameter {name!r}"
        if parameter.kind not in _BY_NAME:
            raise ToolError(f"{where}: a model gives arguments by name; *args, **kwargs and positional ones cannot be")
        if name not in hints:
            raise ToolError(f"{where}: it has no type hint, and the model must be told what it is")
        found[name] = hints[name]
    return found


def _adapter(tool_name: str, name: str, hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint)
    except (PydanticUserError, TypeError, ValueError) as error:
        raise ToolError(f"tool {tool_name!r}, parameter {name!r}: {hint!r} cannot become a JSON schema") from error


def _plain(function: Callable[..., Any]) -> Any:
    """What has the hints: the function itself, or that of an object that can be called."""
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    function = function.func if isinstance(function, functools.partial) else function
    return function if inspect.isroutine(function) else type(function).__call__


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [name for name, one in parameters.items() if one.default is inspect.Parameter.empty]


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}


def _described_by_annotation(hint: Any) -> str | None:
    """`Annotated[int, "how many"]` says what the parameter is."""
    return next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, str)), None)


def _schema_of(tool_name: str, name: str, adapter: TypeAdapter[Any], hint: Any) -> dict[str, Any]:
    where = f"tool {tool_name!r}, parameter {name!r}"
    try:
        schema = adapter.json_schema(schema_generator=_Schema)
    except (PydanticUserError, TypeError, ValueError) as error:
        raise ToolError(f"{where}: its type cannot become a JSON schema") from error
    try:
        plain = cast("dict[str, Any]", _inlined(schema, schema.get("$defs", {}), ()))
    except RecursionError as error:
        raise ToolError(f"{where}: its type holds itself; a model can be told only of types that end") from error
    said = _described_by_annotation(hint)
    return {"description": said, **plain} if said else plain


def _inlined(schema: Any, defs: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    """A schema without references, and without the titles that say a name again. Raises RecursionError."""
    if isinstance(schema, list):
        return [_inlined(one, defs, inside) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        if name in inside:
            raise RecursionError(name)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_inlined(defs[name], defs, (*inside, name)), **rest}
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("$defs", "title", "discriminator"):
            continue
        if key in ("properties", "patternProperties"):
            found[key] = {name: _inlined(one, defs, inside) for name, one in value.items()}
        elif key in ("default", "enum", "const", "examples", "required"):
            found[key] = value
        else:
            found[key] = _inlined(value, defs, inside)
    return found


def _first_paragraph(text: str) -> str:
    return " ".join(text.strip().partition("\n\n")[0].split())


def _documented(text: str) -> dict[str, str]:
    """What a docstring says of each argument: an `Args:` section, or lines of `:param name:`."""
    found: dict[str, str] = {}
    inside, last, indent = False, "", 0
    for line in text.splitlines():
        if match := _FIELD.match(line):
            found[match[1]] = match[2].strip()
        elif _SECTION.match(line):
            inside, last = True, ""
        elif inside and line.strip() and not line.startswith((" ", "\t")):
            inside = False
        elif inside and line.strip():
            deep = len(line) - len(line.lstrip())
            if (match := _ENTRY.match(line)) and (not last or deep <= indent):
                last, indent = match[1], deep
                found[last] = match[2].strip()
            elif last:
                found[last] += f" {line.strip()}"
    return found


def _fault(name: str, error: Mapping[str, Any]) -> str:
    where = ".".join([name, *(str(part) for part in cast("Sequence[Any]", error["loc"]))])
    return f"{where}: {error['msg']}"
