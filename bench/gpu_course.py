"""What the parts of a GPU run share: its size, its clock, its budget of time, and where its lines go."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.evidence import Line

_FLUSH_BYTES = 256 << 20  # more than any cache between a GPU and its memory


@dataclass
class Course:
    """One run. `dry`: in the interpreter, small. `keep` gets every line at once: a run may be cut off."""

    dry: bool
    budget_s: float
    kernels: tuple[str, ...] = ()
    sabotage: str | None = None
    keep: Callable[[Line], None] = lambda line: None
    lines: list[Line] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.began)

    def say(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, "at_s": round(time.monotonic() - self.began, 2), **fields}
        self.lines.append(line)
        self.keep(line)

    def enough_time(self, what: str, wanted_s: float) -> bool:
        """False, and a line that says so, where this would end beyond the budget."""
        if self.left_s >= wanted_s:
            return True
        self.say("skipped", what=what, reason=f"{self.left_s:.0f} s of the budget are left, {wanted_s:.0f} are wanted")
        return False

    def part(self, what: str, wanted_s: float, work: Callable[[], None]) -> None:
        """Do a part of the run; what it raises is a line and no end of the others."""
        if not self.enough_time(what, wanted_s):
            return
        try:
            work()
        except Exception as error:  # any fault of a kernel, driver or compiler: it is what the run is to find
            text = " ".join(str(error).split())
            self.say("failed", what=what, error=f"{type(error).__name__}: {text[:400]}")

    # -- clocks ---------------------------------------------------------------------------------------------------

    def timed(self, work: Callable[[], object], repeats: int = 20) -> list[float]:
        """Device seconds of each call, after two that do not count; caches are cold at the start of each."""
        import torch

        if self.dry:
            return [wall(work)]
        for _ in range(2):
            work()
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
        events = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(repeats)]  # type: ignore[no-untyped-call]
        for before, after in events:
            flush.zero_()
            before.record()
            work()
            after.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in events]

    def walls(self, work: Callable[[], object], repeats: int) -> list[float]:
        """Wall seconds of each call, which must wait for the device by itself, after two that do not count."""
        if self.dry:
            return [wall(work)]
        for _ in range(2):
            work()
        return [wall(work) for _ in range(repeats)]


def wall(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
