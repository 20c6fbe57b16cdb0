"""Every kernel's own samples, and what every kernel's file holds."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import engine.kernels
from engine.kernels import sample

KERNELS = sample.kernel_names()
OUTSIDE_THE_SUBSET = ("autotune", "inline_asm", "libdevice", "block_ptr", "heuristics")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_computes_what_it_means(kernel):
    for one in sample.samples_of(kernel, "tiny"):
        assert one.worst() <= one.bound, one.name


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernels_file_holds_its_launch_and_its_meaning(kernel):
    module = getattr(engine.kernels, kernel)
    functions = [name for name, _ in inspect.getmembers(module, inspect.isfunction)]
    assert any(name.startswith(kernel) for name in functions)
    assert any("meaning" in name for name in functions)
    assert module.__doc__


@pytest.mark.parametrize("path", sorted(Path(engine.kernels.__path__[0]).glob("*.py")), ids=lambda path: path.name)
def test_kernels_stay_in_the_subset_that_the_interpreter_runs(path):
    tree = ast.parse(path.read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert [name for name in names if any(word in name for word in OUTSIDE_THE_SUBSET)] == []
