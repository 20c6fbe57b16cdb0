"""What a sandbox cannot stop, for those who must know it before they rely on one."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
ALWAYS = (
    "a fault of the kernel in what the filter lets through; it is one kernel for all",
    "reading what /proc tells of the host: load, memory, processors, kernel, and where the image lies",
    "guessing from time and shared caches what else this machine does",
)


def by_bubblewrap(held: Collection[str]) -> list[str]:
    """`held`: what control groups hold. Without one, and without a uid for each sandbox, it is more."""
    found = [*ALWAYS]
    if "memory" not in held:
        found.append("taking more memory than its limit for the twentieth of a second until the watchdog looks")
    if "cpu" not in held:
        found.append("using every processor, though after everything else")
    if "pids" not in held and os.getuid() != 0:
        found.append("using up the number of processes that all sandboxes of this user share")
    return [*found, *crash_handler()]


def crash_handler() -> list[str]:
    """What cannot be stopped where a crash starts a program of the host's: a limit of 0 does not, and 1, which does,
    any tool may lower to 0 (core(5))."""
    try:
        program = CORE_PATTERN.read_text().strip()
    except OSError:
        return []
    if not program.startswith("|"):
        return []
    return [f"a tool that crashes from giving its memory to the host's own handler ({program[1:].split()[0]})"]
