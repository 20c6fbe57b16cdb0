"""How busy the machine is with anything but the bench.

It matters for ratios: threads that wait by spinning, as OpenMP's do, lose far more to a busy neighbour than threads
that go to sleep, so that a busy machine compares the engines' manners instead of their speed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

DISTURBED_CORES = 0.25
_WINDOW_S = 0.3
_IDLE, _IOWAIT, _GUEST = 3, 4, 8  # columns of /proc/stat; guest time is in user time already


class Watch:
    """Foreign CPU time between two looks, in cores. `pids`: the bench's own processes."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = [os.getpid(), *pids]
        self._before = self._look()

    def cores(self) -> float:
        """Cores that others have used since the last call, or since the start."""
        busy, own, at = self._look()
        before = self._before
        self._before = (busy, own, at)
        return round(max(0.0, (busy - before[0]) - (own - before[1])) / max(at - before[2], 1e-3), 3)

    def wait(self, patience_s: float) -> float:
        """Wait until others leave the machine alone, but no longer than this. Returns the seconds it took."""
        began = time.monotonic()
        while time.monotonic() - began < patience_s:
            self.cores()
            time.sleep(_WINDOW_S)
            if self.cores() < DISTURBED_CORES / 2:
                break
        self.cores()
        return time.monotonic() - began

    def _look(self) -> tuple[float, float, float]:
        return busy_s(Path("/proc/stat").read_text()), sum(own_s(pid) for pid in self._pids), time.monotonic()


def busy_s(stat: str) -> float:
    """CPU seconds of the whole machine, time stolen by its host included."""
    columns = [int(value) for value in stat.splitlines()[0].split()[1:]]
    spent = sum(value for index, value in enumerate(columns[:_GUEST]) if index not in (_IDLE, _IOWAIT))
    return spent / os.sysconf("SC_CLK_TCK")


def own_s(pid: int) -> float:
    """CPU seconds of one process, all its threads together; 0 where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    after_name = stat.rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
