"""The house's own rules, executed."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "kvtier", "migrations", "runtime", "sandbox", "workflows")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SDK = tomllib.loads((ROOT / "runtime/sdk/pyproject.toml").read_text())


def source_files() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "sdk" not in path.parts]


def test_every_package_is_listed_in_the_distribution():
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".") for path in source_files() if path.name == "__init__.py"
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


@pytest.mark.parametrize(
    "face", ["engine", "engine.capacity", "engine.tokens", "kvtier", "sandbox", "workflows", "tenuto", "runtime.store"]
)
def test_a_face_lists_what_it_exports_in_order_and_documents_itself(face):
    module = importlib.import_module(face)
    assert module.__doc__
    assert list(module.__all__) == sorted(
        module.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize(
    "module", ["runtime.api", "runtime.worker", "runtime.cli", "engine.capacity", "engine.tokens", "sandbox", "kvtier"]
)
def test_torch_stays_in_the_engine_process(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_api_imports_nothing_of_the_engine_but_its_tokens():
    allowed = ("engine.tokens", "engine.capacity")
    for path in (ROOT / "runtime/api").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert [n for n in names if n.split(".")[0] == "engine" and not n.startswith(allowed)] == [], path


def test_only_the_settings_read_the_environment():
    """Passing the environment on to a child is not reading it; what is read is read once, at the edge."""
    reads = re.compile(r"os\.(environ|getenv)")
    found = {str(path.relative_to(ROOT)) for path in source_files() if reads.search(path.read_text())}
    ours = {name for name in found if name.startswith(("runtime/", "workflows/", "kvtier/"))}
    passed_on = {f"runtime/{name}.py" for name in ("up", "supervisor", "embedded/postgres", "embedded/temporal")}
    sandboxed = {"runtime/demo/story.py"}  # the text of a tool
    assert ours <= passed_on | sandboxed | {"runtime/settings.py", "runtime/demo/stack.py"}


def test_every_dependency_has_its_line_in_the_readme():
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    wanted += SDK["project"]["dependencies"] + PROJECT["build-system"]["requires"]
    names = {re.split(r"[<>=]", requirement)[0] for requirement in wanted} - {"tenuto"}
    table = (ROOT / "README.md").read_text().split("### Dependencies")[1]
    listed = {name.strip() for row in re.findall(r"^\| ([^|]+) \|", table, re.M) for name in row.split(",")}
    assert names - listed == set()


def test_nothing_is_left_undone():
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b|NotImplementedError|# type: ignore(?!\[)")
    assert [str(path) for path in source_files() if marks.search(path.read_text())] == []
