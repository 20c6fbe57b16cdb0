"""Which backend this machine can run. Standard library only, so that it can be asked before anything is installed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from . import bubblewrap, docker
from .driver import Driver
from .errors import BadSpec, NoSandbox

BACKENDS = ("docker", "bubblewrap")


@dataclass(frozen=True)
class Choice:
    """`backend` is None where none can run; `reasons` says for each backend why it is not used."""

    backend: str | None
    isolation: str
    reasons: tuple[str, ...]

    def sentence(self) -> str:
        why = "; ".join(self.reasons)
        if self.backend is None:
            return f"No sandbox can run here, so no tool will: {why}. Install bubblewrap, or start Docker."
        return f"Tools will run in {self.backend} ({self.isolation})" + (f"; {why}." if why else ".")


def choose(prefer: str | None = None) -> Choice:
    """Docker where an engine answers, else bubblewrap. Blocking, at most some seconds; changes nothing."""
    if prefer is not None and prefer not in BACKENDS:
        raise BadSpec(f"there is no sandbox backend {prefer!r}; there are {' and '.join(BACKENDS)}")
    reasons: list[str] = []
    for name in BACKENDS if prefer is None else (prefer,):
        reason = docker.why_not() if name == "docker" else bubblewrap.why_not()
        if reason is None:
            isolation = docker.ISOLATION if name == "docker" else bubblewrap.ISOLATION
            return Choice(name, isolation, tuple(reasons))
        reasons.append(reason)
    return Choice(None, "", tuple(reasons))


async def choose_driver(home: Path, run_dir: Path, prefer: str | None = None, *, pull: bool = False) -> Driver:
    """Opens the chosen backend; builds its image under `home` where it is missing (some seconds, once).

    `run_dir` holds one folder per sandbox and names this installation: a driver with the same `run_dir` finds the
    sandboxes of the one before. `pull`: images of users may be fetched from their registries. Raises NoSandbox with a
    sentence that says what to install.
    """
    choice = await asyncio.to_thread(choose, prefer)
    if choice.backend == "docker":
        return await docker.DockerDriver.open(home, run_dir, pull=pull)
    if choice.backend == "bubblewrap":
        return await bubblewrap.BubblewrapDriver.open(home, run_dir)
    raise NoSandbox(choice.sentence())
