"""Functions as tools: what the model is told of them, what they are given, and what it reads of what they gave."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import json
import socket
from typing import Annotated, Any, Literal

import pydantic
import pytest
import tenuto
from tenuto import _tool


class Unit(enum.Enum):
    CELSIUS = "c"
    KELVIN = "k"


class Place(pydantic.BaseModel):
    title: str
    near: list[str] = pydantic.Field(default_factory=list)


@dataclasses.dataclass
class Span:
    start: int
    end: int | None = None


class Tree(pydantic.BaseModel):
    branches: list[Tree] = pydantic.Field(default_factory=list)


@tenuto.tool
def forecast(
    place: Place,
    span: Span,
    unit: Unit = Unit.CELSIUS,
    detail: Literal["short", "long"] = "short",
    weights: Annotated[dict[str, float], "by source"] = {},  # noqa: B006
    schema: Annotated[int | None, pydantic.Field(ge=1)] = None,
) -> dict[str, Any]:
    """What the weather
    will be.

    Args:
        place (Place): where, with
            what is near
        span: of days: from one to another

    Returns: a table.
    """
    return {"unit": unit, "span": span, "place": place.title, "weights": weights, "rest": (detail, schema)}


def test_a_tool_is_told_by_its_hints_and_its_docstring() -> None:
    told = forecast.declaration()
    assert (told["type"], told["name"], told["description"]) == ("client", "forecast", "What the weather will be.")
    properties = told["parameters"]["properties"]
    assert told["parameters"]["required"] == ["place", "span"]
    assert properties["place"]["description"] == "where, with what is near"
    assert properties["place"]["properties"]["title"] == {"type": "string"}
    assert properties["span"]["description"] == "of days: from one to another"
    assert properties["unit"] == {"enum": ["c", "k"], "type": "string", "default": "c"}
    assert properties["weights"]["description"] == "by source"
    assert "$ref" not in json.dumps(told)


def test_a_tool_is_still_the_function() -> None:
    assert forecast(Place(title="Rome"), Span(1))["place"] == "Rome"
    assert forecast.__name__ == "forecast"


def test_arguments_come_as_the_hints_say_and_defaults_are_the_functions() -> None:
    found = forecast.arguments({"place": {"title": "Rome"}, "span": {"start": "3"}, "unit": "k"})
    assert found == {"place": Place(title="Rome"), "span": Span(3), "unit": Unit.KELVIN}


def test_all_that_is_wrong_with_arguments_is_said_at_once() -> None:
    with pytest.raises(tenuto.ToolError) as caught:
        forecast.arguments({"place": {}, "schema": 0, "when": "now"})
    assert str(caught.value) == (
        "place.title: Field required; schema: Input should be greater than or equal to 1; span: it is missing;"
        " when: there is no such argument"
    )


def test_fields_of_a_docstring_describe_parameters_too() -> None:
    def add(a: int, b: int) -> int:
        """Add.

        :param a: the first
        :param int b: the second
        """
        return a + b

    described = {name: one["description"] for name, one in tenuto.tool(add).parameters["properties"].items()}
    assert described == {"a": "the first", "b": "the second"}


def no_hint(x): ...  # type: ignore[no-untyped-def]
def a_socket(x: socket.socket) -> None: ...
def a_function(x: collections.abc.Callable[[int], int]) -> None: ...
def any_number(*x: int) -> None: ...
def by_place(x: int, /) -> None: ...
def endless(x: Tree) -> None: ...
def unknown(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("function", [no_hint, a_socket, a_function, any_number, by_place, endless])
def test_a_parameter_that_no_model_can_give_is_refused_by_name(function: Any) -> None:
    with pytest.raises(tenuto.ToolError, match=f"^tool '{function.__name__}', parameter 'x': "):
        tenuto.tool(function)


def test_hints_and_names_that_cannot_be_are_refused() -> None:
    with pytest.raises(tenuto.ToolError, match="tool 'unknown': its type hints cannot be read: name 'Nowhere'"):
        tenuto.tool(unknown)
    with pytest.raises(tenuto.ToolError, match="'<lambda>' is no name"):
        tenuto.tool(lambda: 1)
    with pytest.raises(tenuto.ToolError, match="two functions have the name 'forecast'"):
        _tool.bound([forecast, forecast])
    with pytest.raises(tenuto.ToolError, match="give a list"):
        _tool.declared("bash")


def test_methods_and_objects_that_can_be_called_are_functions_too() -> None:
    class Adder:
        def __call__(self, a: int) -> int:
            return a

        def twice(self, a: int) -> int:
            """Two of it."""
            return 2 * a

    assert tenuto.tool(Adder().twice).declaration()["description"] == "Two of it."
    named = tenuto.tool(name="one", description="One.", deadline_s=2)(Adder()).declaration()
    assert (named["name"], named["description"], named["deadline_s"]) == ("one", "One.", 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("as it\0 is\ud800", "as it\ufffd is\ufffd"),
        ({"a": Span(1), "b": Unit.KELVIN}, '{"a":{"start":1,"end":null},"b":"k"}'),
        ([1, 2.5, True, None], "[1,2.5,true,null]"),
        ("x" * (_tool.MAX_OUTPUT + 1), "x" * _tool.MAX_OUTPUT),
    ],
)
def test_a_result_is_a_text_that_the_server_takes(value: object, text: str) -> None:
    assert _tool.as_output(value) == text


def test_an_exception_is_told_with_its_type_and_message() -> None:
    assert _tool.as_fault(KeyError("city")) == "KeyError: 'city'"
    assert _tool.as_fault(TimeoutError()) == "TimeoutError"
