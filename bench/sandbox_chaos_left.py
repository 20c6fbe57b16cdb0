"""What sandboxes have left on this machine, of every kind that one is made of."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from bench.own_docker import groups_below
from sandbox import Driver, host
from sandbox.bubblewrap import BubblewrapDriver
from sandbox.docker import DockerDriver

KINDS = ("containers", "processes", "cgroups", "uids", "records", "sockets", "mounts", "networks", "volumes", "parts")


def left_behind(
    driver: Driver, home: Path, run_dir: Path, base: Path, mark: str, engine: str = ""
) -> dict[str, list[str]]:
    """Kind -> names. `mark` is the argument of every tool's process; `base` holds all of ours, and `engine`
    is the parent of all control groups of the engine."""
    assert isinstance(driver, DockerDriver | BubblewrapDriver)
    found = {
        "processes": [*_marked(mark), *(f"agent of {name}" for name, _, _ in host.agents(driver.home))],
        "uids": host.uid_owners(driver.home),
        "records": list(driver.records),
        "sockets": [str(path) for path in run_dir.rglob("*.sock")],
        "parts": [str(path) for pattern in ("*.part", "*.tar") for path in (home / "sandbox").rglob(pattern)],
        "containers": [],
        "networks": [],
        "volumes": [],
    }
    if isinstance(driver, DockerDriver):
        ask = driver.engine.ask
        found["containers"] = ask("ps", "--all", "--format", "{{.Names}}").split()
        names = ask("network", "ls", "--format", "{{.Name}}").split()
        found["networks"] = [name for name in names if name not in ("bridge", "host", "none")]
        found["volumes"] = ask("volume", "ls", "--quiet").split()
        found["cgroups"] = [os.fspath(path) for path in groups_below(engine) if path.name != engine]
    else:
        found["cgroups"] = driver.groups.names(f"{driver.home}-") if driver.groups else []
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [line[4] for line in lines if line[4].startswith((f"{base}/", f"{base.parent}/{engine or base.name}/"))]
    found["mounts"] = [point for point in inside if not point.endswith("/data")]  # that is the engine's own
    return {kind: found[kind] for kind in KINDS}


def _marked(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[:2] == [b"sleep", mark.encode()]:
                found.append(f"process {path.parent.name}")
    return found


__all__ = ["KINDS", "left_behind"]
