from __future__ import annotations

from typing import Any

import pytest

from sandbox import TOOLS, BadArguments, Sandbox, tool_argv
from tests.sandbox.conftest import run


async def test_the_four_tools_work_together(sandbox: Sandbox) -> None:
    async def use(name: str, **arguments: str) -> bytes:
        argv, stdin = tool_argv(name, arguments)
        result = await run(sandbox, *argv, stdin=stdin)
        assert result.ok
        return result.output

    content = "import sys\nprint('hé\0llo', 2 ** 10)\n"
    assert (
        await use("write_file", path="src/main.py", content="print('hello', 2 ** 10)")
        == b"wrote 23 bytes to ./src/main.py\n"
    )
    assert await use("read_file", path="src/main.py") == b"print('hello', 2 ** 10)"
    assert await use("bash", command="python3 src/main.py | tr a-z A-Z") == b"HELLO 1024\n"
    assert await use("python", code="import os; print(os.listdir('src'))") == b"['main.py']\n"
    await use("write_file", path="-odd name", content=content)
    assert await use("read_file", path="-odd name") == content.encode()


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("ruby", {}, "no built-in tool 'ruby'"),
        ("python", {}, "'code' is missing"),
        ("python", {"code": 7}, "must be a string, not int"),
        ("python", {"code": "x", "more": "y"}, "unknown argument 'more'"),
        ("python", {"code": "x" * 2001}, "2001 characters; at most 2000"),
        ("python", {"code": ""}, "is empty"),
        ("bash", {"command": "a\0b"}, "NUL"),
        ("bash", ["ls"], "must be an object"),
        ("read_file", {"path": "../x"}, "outside the workspace"),
        ("read_file", {"path": "/etc/passwd"}, "outside the workspace"),
        ("write_file", {"path": "a/../../x", "content": ""}, "outside the workspace"),
        ("write_file", {"path": "x", "content": "y" * 10_000}, "10000 characters; at most"),
        ("write_file", {"path": "x" * 201, "content": ""}, "at most 200"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_a_sentence(name: str, arguments: Any, complaint: str) -> None:
    with pytest.raises(BadArguments, match=complaint):
        tool_argv(name, arguments)


def test_a_schema_is_closed_and_says_how_long_a_string_may_be() -> None:
    for tool in TOOLS.values():
        schema = tool.parameters
        assert schema["additionalProperties"] is False
        assert schema["required"] == list(schema["properties"])
        assert all(each["type"] == "string" and each["maxLength"] > 0 for each in schema["properties"].values())


def test_it_is_said_which_tools_write_the_workspace() -> None:
    assert {name for name, tool in TOOLS.items() if tool.writes} == {"python", "bash", "shell", "write_file"}
    assert {name for name, tool in TOOLS.items() if tool.effect == "pure"} == {"read_file"}
