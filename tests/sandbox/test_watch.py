"""What a watch saves a look at the workspace, and that nothing done to the files makes it see less than there is."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox.agent import watch as watching
from sandbox.agent.again import Again, Memory
from sandbox.agent.processes import held, mapped, processes
from sandbox.agent.scan import Scan
from sandbox.agent.watch import Watch
from sandbox.agent.workspace import Workspace
from tests.sandbox.mischief import Mischief, change_in_place, exchange, tie

ANY_SEED = random.SystemRandom().randrange(1 << 32)


@pytest.fixture
def root() -> Iterator[Path]:
    """On the file system that workspaces are on."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def memory(root: Path) -> Iterator[Memory]:
    made = Memory(Workspace(str(root)))
    yield made
    made.watch.stop()


def truth(root: Path) -> str:
    """What a look finds that knows nothing and reads everything."""
    workspace = Workspace(str(root))
    found = Scan(workspace, {}, set(), True).root
    workspace.relock()
    return found


def look(memory: Memory, held: set[int] | None = frozenset(), mapped: set[int] | None = frozenset()) -> Scan:  # type: ignore[assignment]
    found = memory.look(mapped, held, False)
    memory.workspace.relock()
    assert found.root == truth(Path(memory.workspace.root))
    return found


def play(root: Path, memory: Memory, seed: int, rounds: int) -> int:
    """Compares after every few things that a tool does; returns how often the watch was enough."""
    tool, enough = Mischief(root, seed), 0
    try:
        for number in range(rounds):
            for _ in range(tool.random.randrange(8)):
                tool.act()
            if tool.random.random() < 0.2:
                tool.end()
            scan = memory.look(tool.mapped(), tool.held(), False)
            memory.workspace.relock()
            assert scan.root == truth(root), f"seed {seed}, round {number}: {' '.join(tool.done)}"
            enough += isinstance(scan, Again)
            tool.done.append("|")
            for folder in [path for path in root.rglob("*") if path.is_dir() and not path.is_symlink()]:
                if folder.stat().st_mode & 0o700 != 0o700 and tool.random.random() < 0.5:
                    folder.chmod(0o755)
    finally:
        tool.end()
    return enough


@pytest.mark.parametrize("seed", [*range(1, 9), ANY_SEED], ids=lambda seed: "any" if seed == ANY_SEED else str(seed))
def test_a_look_with_a_watch_finds_what_a_whole_one_finds(root: Path, memory: Memory, seed: int) -> None:
    assert play(root, memory, seed, 60) > 10
