"""The examples in the SDK's docstrings run as they stand, one after another, against the whole stack."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path

import pytest
import tenuto

from runtime.demo.stack import Stack

_BLOCK = re.compile(r"```python\n(.*?)```", re.S)
_WITH_AN_EXAMPLE = {
    "tenuto",
    "Client",
    "Client.answer",
    "Client.plan",
    "AsyncClient",
    "Sessions.create",
    "Session.run",
    "Session.turn",
    "Session.serve",
    "Session.stream",
    "Session.fork",
    "Session.rewind",
    "Session.files",
    "Session.exec",
    "Session.export",
    "tool",
}


def examples() -> dict[str, str]:
    """Every block of every public docstring of the package, by what it documents."""
    found = {}
    for path in sorted(Path(tenuto.__file__).parent.glob("*.py")):
        module = ast.parse(path.read_text())
        faces: dict[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = {
            "tenuto" if path.stem == "__init__" else path.stem: module
        }
        for node in module.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                faces[node.name] = node
                faces |= {
                    f"{node.name}.{one.name}": one
                    for one in node.body
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
                }
        for name, node in faces.items():
            for at, block in enumerate(_BLOCK.findall(ast.get_docstring(node) or "")):
                found[f"{name}/{at}" if at else name] = block
    return found


def test_what_people_look_up_first_has_an_example() -> None:
    assert _WITH_AN_EXAMPLE - examples().keys() == set()


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.stack
@pytest.mark.sandbox
@pytest.mark.model
@pytest.mark.parametrize("name", sorted(examples()))
async def test_an_example_runs(name: str, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENUTO_API_URL", stack.api_url)
    monkeypatch.setenv("TENUTO_API_KEY", stack.api_key)
    monkeypatch.chdir(tmp_path)
    code = compile(examples()[name], f"<example of {name}>", "exec")
    await asyncio.to_thread(exec, code, {"__name__": "__main__"})
